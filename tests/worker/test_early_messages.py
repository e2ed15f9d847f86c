"""Messages for requests that are not known here: kept, taken, dropped, and never with a tensor that stays lent."""

from __future__ import annotations

from mstar_core.messages.flow import StreamTensor, Value, Values
from mstar_core.messages.tensors import ShmTensor
from mstar_core.worker.early_messages import MOST_MESSAGES, EarlyMessages


def lent(slot: int) -> ShmTensor:
    return ShmTensor(dtype="float32", shape=(4,), owner="worker-1", offset=0, size_bytes=16, slot=slot, generation=1)


def stream_item(handle: int, slot: int) -> StreamTensor:
    return StreamTensor(stream="s", handle=handle, index=0, ref=lent(slot))


def value(handle: int, slot: int | None) -> Values:
    ref = None if slot is None else lent(slot)
    return Values(items=[Value(handle=handle, run=1, task=0, port="x", iteration=[], ref=ref)])


def test_what_is_taken_is_not_abandoned() -> None:
    early = EarlyMessages()
    assert early.keep(1, stream_item(1, 5), ()) and early.keep(1, value(1, 6), ())
    assert [type(message) for message in early.take(1)] == [StreamTensor, Values]
    assert early.abandoned == []


def test_what_waited_for_a_request_that_ended_is_given_back() -> None:
    early = EarlyMessages()
    early.keep(1, stream_item(1, 5), ())
    early.keep(2, stream_item(2, 6), ())
    early.closed(1)
    assert [ref.slot for ref in early.abandoned if isinstance(ref, ShmTensor)] == [5]


def test_what_comes_after_the_end_is_given_back() -> None:
    early = EarlyMessages()
    early.closed(1)
    for message in (stream_item(1, 5), value(1, 6), value(1, None)):
        assert early.keep(1, message, ())
    assert [ref.slot for ref in early.abandoned if isinstance(ref, ShmTensor)] == [5, 6]
    assert early.dropped == 3


def test_the_oldest_gives_way_and_its_tensors_are_given_back() -> None:
    early = EarlyMessages()
    for handle in range(MOST_MESSAGES + 1):
        early.keep(handle, stream_item(handle, handle), ())
    assert [ref.slot for ref in early.abandoned if isinstance(ref, ShmTensor)] == [0]
    early.clear()
    assert len(early.abandoned) == MOST_MESSAGES + 1
