"""Progress views of a start, from snapshots; and durations of the command line."""

from __future__ import annotations

import io
from typing import Any

import pytest

from mstar_core.errors import UsageError
from mstarctl.output.durations import parse_duration
from mstarctl.start.progress import PlainView, TerminalView, bar, ready_line, row_line, rows_of, widths_of


def snapshot(phase: str = "weights", done: int = 1 << 20, total: int = 4 << 20, state: str = "known") -> dict[str, Any]:
    worker = {"name": "worker-0", "state": state, "phase": phase, "done": done, "total": total, "detail": "a\x1b[2Jb"}
    api = {"name": "api", "state": "ready", "phase": "ready", "done": 0, "total": 0, "detail": ""}
    head = {
        "endpoint": "http://h:1",
        "ready_s": 48.12,
        "age_s": 50,
        "phases_s": {"fetch": 21.4, "kv": 1.04, "pool": 0.01},
    }
    children = {"worker-0": worker, "api": api, "supervisor": {"name": "supervisor", "state": "ready"}}
    return {"deployment": head, "ranks": {"0": {"rank": 0, "nodes": ["LLM", "snac"]}}, "children": children}


def test_a_rank_shows_its_nodes_its_bar_and_what_is_left() -> None:
    rows = rows_of(snapshot())
    line = row_line(rows[0], widths_of(rows), rate=1 << 20)
    assert line.split() == [
        "rank",
        "0",
        "LLM",
        "snac",
        "weights",
        bar(0.25),
        "1.0",
        "MiB/4.0",
        "MiB",
        "1.0",
        "MiB/s",
        "3.0",
        "s",
        "left",
        "a\\x1b[2Jb",
    ]
    assert row_line(rows[1], widths_of(rows)).split() == ["api", "http://h:1", "ready"]


def test_counts_are_no_bytes() -> None:
    row = rows_of(snapshot("capture", 17, 24))[0]
    assert row.amount == "17/24"


@pytest.mark.parametrize("share", [0.0, 0.33, 1.0])
def test_a_bar_has_one_width(share: float) -> None:
    assert len(bar(share)) == len(bar(share, is_ascii=True)) == 20


def test_the_last_line_names_the_phases_that_took_time() -> None:
    assert ready_line(snapshot()) == "ready in 48.1 s (fetch 21, kv 1.0)"


def test_a_pipe_gets_a_line_for_each_phase_and_not_for_each_look() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    for state in (snapshot(), snapshot(done=2 << 20), snapshot("kv", 0, 0), snapshot("ready", 0, 0, "ready")):
        view.show(state)
    assert [line.split()[-1] for line in stream.getvalue().splitlines()] == ["MiB", "ready", "kv", "ready"]


def test_a_terminal_is_redrawn_in_place_and_never_wider_than_it_is() -> None:
    stream = io.StringIO()
    view = TerminalView(stream, 40)
    view.show(snapshot())
    view.show(snapshot(done=2 << 20))
    assert stream.getvalue().count("\x1b[2A") == 1
    lines = [
        line.removeprefix("\x1b[2A").removeprefix("\r\x1b[2K")
        for line in stream.getvalue().splitlines()
        if "rank" in line
    ]
    assert all(len(line) < 46 for line in lines)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30.0), ("1.5s", 1.5), ("10m", 600.0), ("1h30m", 5400.0), ("250ms", 0.25)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text, "--x") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "1x", "1 s", "1s2", "nan"])
def test_other_words_are_no_times(text: str) -> None:
    with pytest.raises(UsageError, match="--x"):
        parse_duration(text, "--x")
