"""Tensors between GPU workers, with memory that needs no GPU: loans, order, failures, and what stays."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from mstar_core.errors import ArenaFull, TransportError
from mstar_core.messages.flow import CacheMoved, StreamItems, StreamTensor
from mstar_core.messages.tensors import InlineTensor, PeerTensor, TensorRef
from mstar_core.transport.tensors import inline, loan_of
from mstar_core.worker.incoming.arrivals import Arrivals
from mstar_core.worker.peer_memory.transport import FIRST_SLOT, PATIENCE_S, PeerMemory
from tests.fakes.shared_memory import SharedMemory

KIB = 1 << 10
VALUES = [
    torch.arange(5),
    torch.randn(3, 4),
    torch.randn(7).to(torch.bfloat16),
    torch.tensor([True, False]),
    torch.zeros(0, 4),
    torch.tensor(3.5),
    torch.randn(6, 8).t(),
]


class Pair:
    """Two workers that share memory."""

    def __init__(self, **limits: int) -> None:
        self.shared = SharedMemory()
        sizes = {"segment_bytes": 4 * KIB, "most_bytes": 16 * KIB, "least_bytes": 0, **limits}
        self.now = 0.0
        self.owner = PeerMemory("worker-0", 3, self.shared.end(), ["worker-1"], clock=lambda: self.now, **sizes)
        self.reader = PeerMemory("worker-1", 5, self.shared.end(), ["worker-0"], **sizes)

    def send(self, value: torch.Tensor) -> PeerTensor:
        outgoing = self.owner.send(value, "worker-1")
        assert outgoing.is_done
        decoded: PeerTensor = msgspec.msgpack.decode(msgspec.msgpack.encode(outgoing.ref), type=TensorRef)  # type: ignore[call-overload]
        assert decoded == outgoing.ref
        return decoded

    def read(self, ref: PeerTensor) -> torch.Tensor:
        self.reader.begin(ref)
        assert self.reader.is_ready(ref)
        return self.reader.take(ref)

    def give_back(self, ref: PeerTensor) -> bool:
        loan = loan_of(ref)
        assert loan is not None and loan.owner == "worker-0"
        return self.owner.release(loan.slot, loan.generation)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.reader.close()
    made.owner.close()
    assert made.shared.opened == 0 and made.shared.left == 1 << 24


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.dtype}{list(value.shape)}")
def test_values_arrive_and_their_loans_end(pair: Pair, value: torch.Tensor) -> None:
    ref = pair.send(value)
    found = pair.read(ref)
    assert found.dtype == value.dtype and torch.equal(found, value)
    assert (pair.owner.live, ref.slot >= FIRST_SLOT) == (1, True)
    assert pair.give_back(ref) and not pair.give_back(ref)
    assert (pair.owner.live, pair.owner.used_bytes) == (0, 0)


def test_a_tensor_waits_for_room_and_goes_on(pair: Pair) -> None:
    first = [pair.send(torch.full((4 * KIB,), number, dtype=torch.uint8)) for number in range(4)]
    late = pair.owner.send(torch.full((4 * KIB,), 9, dtype=torch.uint8), "worker-1")
    assert not late.is_done
    pair.give_back(first[2])
    assert late.is_done
    assert int(pair.read(late.ref)[0]) == 9
    for ref in (first[0], first[1], first[3], late.ref):
        pair.give_back(ref)


def test_memory_grows_beyond_its_limit_after_a_while(pair: Pair) -> None:
    refs = [pair.send(torch.ones(4 * KIB, dtype=torch.uint8)) for _ in range(4)]
    late = pair.owner.send(torch.full((4 * KIB,), 9, dtype=torch.uint8), "worker-1")
    pair.now += PATIENCE_S / 2
    assert not late.is_done
    pair.now += PATIENCE_S
    assert late.is_done and int(pair.read(late.ref)[0]) == 9
    for ref in (*refs, late.ref):
        pair.give_back(ref)


def test_exported_memory_is_kept_while_readers_may_have_it_mapped(pair: Pair) -> None:
    refs = [pair.send(torch.ones(4 * KIB, dtype=torch.uint8)) for _ in range(4)]
    for ref in refs:
        pair.give_back(ref)
    large = pair.owner.send(torch.ones(15 * KIB, dtype=torch.uint8), "worker-1")
    assert not large.is_done
    pair.now += 2 * PATIENCE_S
    assert large.is_done and pair.read(large.ref).sum() == 15 * KIB
    assert pair.read(pair.send(torch.ones(4 * KIB, dtype=torch.uint8))).sum() == 4 * KIB


def test_a_tensor_that_never_fits_names_the_limit(pair: Pair) -> None:
    outgoing = pair.owner.send(torch.ones(17 * KIB, dtype=torch.uint8), "worker-1")
    assert outgoing.is_done
    with pytest.raises(ArenaFull, match="too large"):
        _ = outgoing.ref


def test_a_device_without_memory_is_an_error_of_the_tensor(pair: Pair) -> None:
    pair.shared.left = 0
    outgoing = pair.owner.send(torch.ones(9), "worker-1")
    assert outgoing.is_done
    with pytest.raises(TransportError, match="out of memory"):
        _ = outgoing.ref
    pair.shared.left = 1 << 24


def test_a_dead_reader_ends_its_loans_and_a_dead_owner_is_unmapped(pair: Pair) -> None:
    ref = pair.send(torch.ones(9))
    pair.read(ref)
    assert pair.shared.opened == 1
    assert pair.owner.reclaim("worker-1", 5) == 1
    assert pair.owner.live == 0
    pair.reader.reclaim("worker-0", 3)
    assert pair.shared.opened == 0


def test_a_handle_that_contradicts_itself_is_refused(pair: Pair) -> None:
    ref = pair.send(torch.ones(9))
    for changes in ({"shape": (10,)}, {"dtype": "nonsense"}, {"memory": bytes(64)}):
        with pytest.raises(TransportError):
            pair.reader.begin(msgspec.structs.replace(ref, **changes))  # type: ignore[arg-type]
    pair.give_back(ref)


def item(index: int, ref: PeerTensor | InlineTensor) -> StreamTensor:
    return StreamTensor(stream="s", handle=1, index=index, ref=ref)


def test_messages_of_a_sender_keep_their_order_and_nothing_blocks(pair: Pair) -> None:
    arrivals, small = Arrivals(pair.reader), inline(torch.ones(1).numpy())
    refs = [pair.send(torch.ones(9)), pair.send(torch.ones(9))]
    pair.shared.is_slow = True
    assert not arrivals.hold("worker-0", item(0, small))
    assert arrivals.hold("worker-0", item(1, refs[0]))
    assert arrivals.hold("worker-0", item(2, small))
    ids = StreamItems(stream="t", handles=[1], index=[0], ids=[7])
    assert arrivals.hold("worker-0", ids)
    assert not arrivals.hold("worker-2", item(0, small)), "another sender does not wait"
    cache = CacheMoved(
        handle=2,
        run=1,
        source=0,
        node="LM",
        branch="main",
        length=1,
        position=1,
        last=0,
        drawn=0,
        history=small,
        pages=[refs[1]],
    )
    assert arrivals.hold("worker-0", cache)
    assert arrivals.is_waiting and not arrivals.has_ready
    pair.shared.finish()
    assert arrivals.has_ready
    assert [arrival.message for arrival in arrivals.take()] == [item(1, refs[0]), item(2, small), ids]
    pair.shared.finish()
    assert [arrival.message for arrival in arrivals.take()] == [cache]
    assert not arrivals.is_waiting
    for ref in refs:
        pair.reader.take(ref)
        pair.give_back(ref)


def moved(handle: int, *pages: PeerTensor) -> CacheMoved:
    return CacheMoved(
        handle=handle,
        run=1,
        source=0,
        node="LM",
        branch="main",
        length=1,
        position=1,
        last=0,
        drawn=0,
        history=inline(torch.ones(1).numpy()),
        pages=list(pages),
    )


def test_caches_are_read_as_far_as_their_memory_allows(pair: Pair) -> None:
    importing = [0]
    arrivals = Arrivals(pair.reader, lambda: importing[0], cache_bytes=100)
    refs = [pair.send(torch.ones(60, dtype=torch.uint8)) for _ in range(3)]
    for handle, ref in enumerate(refs):
        assert arrivals.hold("worker-0", moved(handle, ref))
    assert [arrival.message for arrival in arrivals.take()] == [moved(0, refs[0])]
    importing[0] = 60
    assert list(arrivals.take()) == [] and pair.reader.reading == 1
    importing[0] = 0
    assert [arrival.message for arrival in arrivals.take()] == [moved(1, refs[1])]
    pair.shared.bad_reads = 1
    (failed,) = arrivals.take()
    assert failed.error is not None
    assert failed.message == moved(2, refs[2]) and "a bad link" in failed.error.detail
    assert not arrivals.is_waiting
    for ref in refs:
        pair.reader.drop(ref)
        pair.give_back(ref)


def test_a_dropped_tensor_does_not_hold_its_message(pair: Pair) -> None:
    arrivals = Arrivals(pair.reader)
    ref = pair.send(torch.ones(9))
    pair.shared.is_slow = True
    arrivals.hold("worker-0", item(0, ref))
    pair.reader.drop(ref)
    assert len(list(arrivals.take())) == 1
    pair.shared.finish()
    pair.give_back(ref)
