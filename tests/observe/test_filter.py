"""Filter language: the meaning of each kind of term, and its errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.errors import UsageError
from mstar_core.observe.filter import LIMIT_CHARS, Filter
from mstar_core.observe.frames import RequestStatus

NOW = 10.0
TALK = RequestStatus(
    id="r-7f3a",
    handle=1,
    model="qwen3_omni",
    inputs=["text"],
    outputs=["text", "audio"],
    state="run",
    node="talker",
    rank=0,
    host="node-b",
    walk="talk",
    active=["think", "talk"],
    started=7.0,
    ttft_ms=231.0,
    tokens=312,
    audio_s=5.0,
    pages=96,
)
QUEUED = RequestStatus(
    id="r-7f40",
    handle=2,
    model="qwen3_omni",
    inputs=["video"],
    outputs=["text"],
    state="queue",
    started=9.8,
    why="needs 96 pages",
)
FAILED = RequestStatus(id="other", handle=3, state="failed", started=1.0, ended=2.0, error="worker_lost")
ALL = {"talk": TALK, "queued": QUEUED, "failed": FAILED}


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("", "talk queued failed"),
        ("state:queue", "queued"),
        ("state:fa", "failed"),
        ("state:running", "talk"),
        ("state:*", "talk queued failed"),
        ("model:qwen*", "talk queued"),
        ("id:r-7f?a", "talk"),
        ("walk:think", "talk"),
        ("rank:0", "talk"),
        ("host:node-b", "talk"),
        ("host:local", ""),
        ("in:video", "queued"),
        ("ttft>200", "talk"),
        ("ttft>0.2s", "talk"),
        ("ttft<=230", ""),
        ("age>=2s", "talk"),
        ("age<300ms", "queued"),
        ("tokens=312", "talk"),
        ("rtf>0.5", "talk"),
        ("err", "failed"),
        ("!err", "talk queued"),
        ("speech", "talk"),
        ("PAGES", "queued"),
        ("model:qwen* !state:queue", "talk"),
        ("state:queue OR err", "queued failed"),
        ("/r-7f[0-9]+$/ OR /^other/", "failed"),
        ("/r-7f[0-9]a/", "talk"),
    ],
)
def test_a_filter_matches(text: str, taken: str) -> None:
    parsed = Filter.parse(text, expressions=True)
    assert [name for name, request in ALL.items() if parsed.takes(request, NOW)] == taken.split()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stat:queue", "did you mean 'state'"),
        ("tftt>3", "did you mean 'ttft'"),
        ("ttft:500", "ttft>0"),
        ("state>5", "state:5"),
        ("state:done", "no request has the state"),
        ("state:finnished", "did you mean 'finished'"),
        ("ttft>fast", "not a number"),
        ("tokens>5ms", "write the number alone"),
        ("age>5d", "ms, s, m or h"),
        ("a OR", "both sides"),
        ("x" * (LIMIT_CHARS + 1), "too long"),
    ],
)
def test_an_invalid_filter_is_an_error_and_not_an_empty_list(text: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        Filter.parse(text)
    assert says in str(error.value)
    assert error.value.code == "invalid_filter"


def test_a_server_refuses_regular_expressions() -> None:
    with pytest.raises(UsageError, match="does not accept regular expressions"):
        Filter.parse("/a+/")


def test_a_filter_knows_if_its_result_depends_on_time() -> None:
    assert Filter.parse("!age>3 tokens>4").is_timed
    assert not Filter.parse("tokens>4 id:a").is_timed


@given(st.text(max_size=60))
def test_any_text_is_a_filter_or_a_usage_error(text: str) -> None:
    try:
        parsed = Filter.parse(text)
    except UsageError:
        return
    for request in ALL.values():
        parsed.takes(request, NOW)
