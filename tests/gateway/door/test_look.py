"""The look at a body finds the routing fields, whole or in its first piece, in any order and form."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.gateway.door.look import NOTHING, BodyFacts, facts_of, json_facts, scan

JSON = "application/json; charset=utf-8"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@given(
    fields=st.dictionaries(st.text(max_size=8).filter(lambda name: name != "model"), VALUES, max_size=6),
    model=st.text(min_size=1, max_size=20),
    is_ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
    at=st.integers(0, 6),
)
def test_a_scan_finds_what_a_parser_finds(
    fields: dict[str, object], model: str, is_ascii: bool, indent: int | None, at: int
) -> None:
    items = list(fields.items())
    body = json.dumps(dict([*items[:at], ("model", model), *items[at:]]), ensure_ascii=is_ascii, indent=indent)
    encoded = body.encode("utf-8", "surrogatepass")
    assert json_facts(dict(scan(encoded))).model == facts_of(JSON, encoded, is_whole=True).model
    assert facts_of(JSON, encoded, is_whole=True).model == model


@given(cut=st.integers(0, 200))
def test_a_cut_body_never_names_another_model(cut: int) -> None:
    body = b'{"a": "\\"model\\": \\"no\\"", "b": {"model": "no"}, "c": [{"model": "no"}], "model": "yes", "z": "\\\\"}'
    assert facts_of(JSON, body[:cut], is_whole=False).model in (None, "yes")


def test_all_fields_are_read() -> None:
    body = {
        "max_tokens": 7,
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "session_id": "s",
        "previous_response_id": "resp_1",
        "request_id": "mine",
        "voice": "tara",
        "model": "llm",
    }
    facts = facts_of(JSON, json.dumps(body).encode(), is_whole=True)
    assert facts == BodyFacts(
        model="llm",
        is_streamed=True,
        session_id="s",
        previous_response_id="resp_1",
        request_id="mine",
        voice="tara",
        max_output_tokens=7,
        prompt=json.dumps(body["messages"]).encode(),
    )


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff\xfe", b"null", b'{"model": 3}', b'{"model": null}'])
@pytest.mark.parametrize("is_whole", [True, False])
def test_an_unreadable_body_has_no_facts(body: bytes, is_whole: bool) -> None:
    assert facts_of(JSON, body, is_whole=is_whole) == NOTHING


def test_settings_of_a_realtime_session_name_the_model() -> None:
    body = b'{"session": {"type": "realtime", "model": "omni"}}'
    assert facts_of(JSON, body, is_whole=True).model == "omni"
    form = b'--b\r\nContent-Disposition: form-data; name="session"\r\n\r\n{"model": "omni"}\r\n--b--\r\n'
    assert facts_of("multipart/form-data; boundary=b", form, is_whole=True).model == "omni"


def test_a_form_is_read_with_quotes_and_without_its_files() -> None:
    form = (
        b'--a b\r\nContent-Disposition: form-data; name="model"; filename="model"\r\n\r\nno\r\n'
        b"--a b\r\ncontent-disposition: form-data; name=model\r\nContent-Type: text/plain\r\n\r\nyes\r\n--a b--"
    )
    assert facts_of('multipart/form-data; boundary="a b"', form, is_whole=False).model == "yes"
