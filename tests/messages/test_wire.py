"""Wire format: stable, bounded, and equal to its written schema."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.errors import TransportError
from mstar_core.messages.life import Ping
from mstar_core.messages.requests import CancelRequest
from mstar_core.messages.wire import WIRE_VERSION, Message, WireCodec

KINDS: tuple[type[msgspec.Struct], ...] = typing.get_args(Message)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_message_is_documented_and_has_its_own_tag(kind: type[msgspec.Struct]) -> None:
    assert kind.__doc__
    assert [k.__struct_config__.tag for k in KINDS].count(kind.__struct_config__.tag) == 1


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_clean_refusal(data: bytes) -> None:
    try:
        WireCodec("a", 1).decode(data)
    except TransportError as error:
        assert str(len(data)) in error.detail


@given(
    st.lists(st.text(max_size=5), max_size=3),
    st.integers(0, 2**62),
    st.sampled_from(["by_id", "disconnect", "deadline"]),
    st.integers(0, 200),
)
def test_encode_decode_encode_is_stable_and_cut_bytes_are_refused(
    names: list[str], handle: int, why: str, cut: int
) -> None:
    codec = WireCodec("".join(names) or "api", 3)
    data = codec.encode(CancelRequest(handle=handle, why=why))
    envelope = codec.decode(data)
    assert codec.encode(envelope.body) == data
    assert (envelope.sender, envelope.incarnation) == (codec.sender, 3)
    if cut < len(data):
        with pytest.raises(TransportError):
            codec.decode(data[:cut])


def test_unknown_newer_fields_are_skipped() -> None:
    newer = msgspec.msgpack.encode([WIRE_VERSION, "api", 1, {"type": "ping", "seq": 4, "colour": "blue"}, "more"])
    assert WireCodec("a", 1).decode(newer).body == Ping(seq=4)


def test_another_major_version_is_refused_by_name() -> None:
    other = msgspec.msgpack.encode([WIRE_VERSION + 1, "worker-3", 1, {"type": "ping", "seq": 4}])
    with pytest.raises(TransportError, match="worker-3 speaks wire version"):
        WireCodec("a", 1).decode(other)
