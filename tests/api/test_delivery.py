"""Replay of a response: outputs pass up to those that the client has, whatever the pieces in which they come."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.api.handover.delivery import Delivery, UnitGate
from mstar_core.api.handover.recording import ConnectionRecording
from mstar_core.api.handover.transport import RecordedTransport
from mstar_core.api.output.units import OutputItem
from mstar_core.messages.flow import Drawn

IDS = 24


class Sink(asyncio.Transport):
    """A socket that accepts everything."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return 0


@contextmanager
def connected(fd: int | None = None) -> Iterator[tuple[RecordedTransport, Sink, int]]:
    """A recorded transport, its socket and the memory file. fd: the file of a process that was killed."""
    if fd is None:
        recording, own = ConnectionRecording.create()
        recording.begin("r", "t", 0.0, 0.0)
    else:
        recording, own = ConnectionRecording.adopt(fd), os.dup(fd)
    sink = Sink()
    try:
        yield RecordedTransport(sink, recording), sink, own
    finally:
        recording.close()
        os.close(own)


def delivery_of(transport: RecordedTransport) -> Delivery:
    """The delivery of a response that is written at once."""
    return Delivery(transport, lambda: None)


def send(delivery: Delivery, transport: RecordedTransport, units: dict[str, int] | None, data: bytes) -> None:
    """Send one part. units: outputs up to its end; None: a line without any."""
    if units is not None:
        delivery.sends(0, units)
    delivery.writes()
    transport.write(data)
    delivery.written()
    if units is not None:
        delivery.sent()


def begun(transport: RecordedTransport) -> Delivery:
    """A response with a first line and three units, whose loop has drawn four ids."""
    delivery = delivery_of(transport)
    for start, ids in ((0, [5, 6]), (2, [7, 8])):
        delivery.drawn(0, Drawn(handle=1, place="LLM", start=start, ids=ids))
    send(delivery, transport, None, b"start ")
    send(delivery, transport, {"text": 2}, b"one two ")
    send(delivery, transport, {"text": 3}, b"three ")
    return delivery


async def test_a_response_goes_on_behind_the_outputs_that_the_client_has_however_they_are_cut() -> None:
    with connected() as (dead, _, fd):
        begun(dead)
        with connected(fd) as (transport, sink, _):
            transport.mute()
            delivery = delivery_of(transport)
            gate = delivery.gate(0)
            delivery.passed_head()
            send(delivery, transport, None, b"start")
            assert ids_of(gate.take([text([5, 6, 7, 8])])) == [5, 6, 7], "the last one comes alone"
            send(delivery, transport, {"text": 1}, b"one ")
            assert delivery.is_replay
            send(delivery, transport, {"text": 3}, b"two, and three ")
            await asyncio.wait_for(delivery.caught_up(), 60)
            gate.open()
            assert ids_of(gate.take(())) == [8]
            send(delivery, transport, {"text": 4}, b"four")
            assert sink.written == b"four" and not delivery.is_replay


async def test_a_part_of_several_writes_is_recorded_before_the_first() -> None:
    with connected() as (dead, sink, fd):
        delivery = delivery_of(dead)
        delivery.sends(0, {"text": 1})
        delivery.writes()
        await dead.record([b"on", b"e"])
        with connected(fd) as (transport, _, _):
            recording = transport.recording
            assert (recording.response(0), recording.record.units) == (b"one", [{"text": 1}])
        dead.write(b"o")
        dead.writelines([b"n", b"e"])
        send(delivery, dead, {"text": 2}, b" two")
        assert sink.written == b"one two"
        with connected(fd) as (transport, _, _):
            assert transport.recording.response(3) == b" two"


def test_the_next_process_knows_the_drawn_ids_and_sends_them_with_the_request() -> None:
    with connected() as (dead, _, fd):
        begun(dead)
        with connected(fd) as (transport, _, _):
            transport.mute()
            delivery = delivery_of(transport)
            assert delivery.is_begun
            assert delivery.journal(0).ids() == {"LLM": [5, 6, 7, 8]}
            assert delivery.journal(1).ids() == {}


def test_keep_alives_before_the_first_output_are_neither_repeated_nor_taken_for_it() -> None:
    with connected() as (dead, _, fd):
        delivery_of(dead)
        for part in (b"head ping ", b"ping "):
            dead.write(part)
        with connected(fd) as (transport, sink, _):
            transport.mute()
            delivery = delivery_of(transport)
            transport.write(b"head ")
            delivery.passed_head()
            assert not delivery.is_replay
            send(delivery, transport, {"text": 1}, b"one")
            assert sink.written == b"one"


def test_a_replay_that_fails_lets_its_error_through() -> None:
    with connected() as (dead, _, fd):
        begun(dead)
        with connected(fd) as (transport, sink, _):
            transport.mute()
            delivery = delivery_of(transport)
            send(delivery, transport, {"text": 1}, b"one")
            delivery.fail()
            send(delivery, transport, None, b"error")
            assert sink.written == b"error"


def text(ids: list[int]) -> OutputItem:
    """An output of ids."""
    return OutputItem(modality="text", port="text", array=np.array(ids, np.int32))


def ids_of(items: list[OutputItem]) -> list[int]:
    """The ids of some outputs."""
    return [int(value) for item in items for value in item.array]


@given(delivered=st.integers(0, IDS), cuts=st.lists(st.integers(1, 6), min_size=1, max_size=IDS))
def test_the_outputs_of_the_client_come_alone_and_nothing_is_lost(delivered: int, cuts: list[int]) -> None:
    gate = UnitGate({"text": delivered})
    arriving, start = [], 0
    while start < IDS:
        for cut in cuts:
            arriving.append(text(list(range(start, min(IDS, start + cut)))))
            start = min(IDS, start + cut)
    passed: list[int] = []
    while not gate.is_reached:
        passed += ids_of(gate.take([arriving.pop(0)]))
    assert passed == list(range(delivered))
    gate.open()
    passed += ids_of(gate.take(()))
    for item in arriving:
        passed += ids_of(gate.take([item]))
    assert passed == list(range(IDS)) and gate.is_empty


def test_a_port_that_is_ahead_waits_for_the_others() -> None:
    gate = UnitGate({"text": 2, "image": 1})
    image = OutputItem(modality="image", port="image", array=np.zeros((2, 2), np.uint8))
    assert ids_of(gate.take([text([0, 1, 2, 3])])) == [0, 1]
    before = gate.is_reached
    assert gate.take([image, image]) == [image]
    assert (before, gate.is_reached) == (False, True)
    gate.open()
    rest = gate.take(())
    assert ids_of(rest[:1]) == [2, 3] and rest[1:] == [image]
