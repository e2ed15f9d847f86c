"""Outgoing messages: tensors on a GPU are copied without blocking, and messages keep their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mstar_core.engine.base import CacheState
from mstar_core.errors import ArenaFull, PeerStalled
from mstar_core.messages.flow import CacheMoved, Outputs, StreamTensor, Values
from mstar_core.messages.tensors import InlineTensor, ShmTensor
from mstar_core.messages.wire import WireCodec
from mstar_core.messages.work import Move, WalkDone, WorkFailed
from mstar_core.transport.courier import MESSAGE_BYTES
from mstar_core.transport.tensors import inline, inline_array
from mstar_core.worker.outbox import Outbox


class Transport:
    """lends: as loans instead of inside the message. lent: slots of the open loans."""

    is_full = False
    lends = False

    def __init__(self) -> None:
        self.lent: list[int] = []

    def put(self, array: Any, to: str, *, dtype: str | None = None) -> Any:
        if self.is_full:
            raise ArenaFull("no room")
        return self.lend(array, to, dtype=dtype) if self.lends else inline(array, dtype)

    def lend(self, array: Any, to: str, *, dtype: str | None = None) -> Any:
        if self.is_full:
            raise ArenaFull("no room")
        self.lent.append(len(self.lent) + 1)
        return ShmTensor(
            dtype="float32",
            shape=array.shape,
            owner="worker-0",
            offset=0,
            size_bytes=array.nbytes,
            slot=self.lent[-1],
            generation=1,
        )

    def release(self, slot: int, generation: int) -> bool:
        self.lent.remove(slot)
        return True


class Copy:
    """A copy that ends when the test says so."""

    is_done = False

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source
        self.pending = torch.zeros_like(source)

    def finish(self) -> None:
        self.pending.copy_(self._source)
        self.is_done = True


class Setup:
    """An outbox with copies that end when the test says so."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.copies: list[Copy] = []
        self.stalled: set[str] = set()
        self.gone: set[str] = set()
        self.transport = Transport()
        self.elsewhere: set[str] = set()
        self.outbox = Outbox(
            "worker-0",
            0,
            self,
            self.transport,  # type: ignore[arg-type]
            self.copy,
            is_elsewhere=self.elsewhere.__contains__,
        )

    def send(self, name: str, message: Any) -> bool:
        if name in self.stalled and not isinstance(message, WorkFailed):
            raise PeerStalled(f"{name} does not read its messages", peer=name)
        if name in self.gone:
            return False
        self.sent.append((name, message))
        return True

    def copy(self, tensor: torch.Tensor) -> Copy:
        self.started = Copy(tensor)
        self.copies.append(self.started)
        return self.started

    def finish(self) -> None:
        self.started.finish()

    @property
    def kinds(self) -> list[type]:
        return [type(message) for _, message in self.sent]


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_a_turn_leaves_when_its_copies_are_done(setup: Setup) -> None:
    setup.outbox.value(1, 7, 1, 0, "features", [], torch.tensor([1.0, 2.0]))
    setup.outbox.walk_done(WalkDone(handle=7, run=1, rank=0))
    setup.outbox.flush()
    assert setup.sent == [] and setup.outbox.is_waiting and not setup.outbox.can_send
    setup.finish()
    assert setup.outbox.can_send
    setup.outbox.flush()
    assert setup.kinds == [Values, WalkDone] and not setup.outbox.is_waiting
    assert inline_array(setup.sent[0][1].items[0].ref).tolist() == [1.0, 2.0]


def test_a_saved_state_delays_no_turn(setup: Setup) -> None:
    halves = torch.tensor([1.0, float("nan"), -0.0]).to(torch.bfloat16)
    setup.outbox.saved(7, "LLM:4/denoise", 8, {"latents": halves})
    setup.outbox.walk_done(WalkDone(handle=7, run=1, rank=0))
    setup.outbox.flush()
    assert setup.kinds == [WalkDone] and setup.outbox.is_waiting and not setup.outbox.can_send
    setup.finish()
    assert setup.outbox.can_send
    setup.outbox.flush()
    assert setup.kinds == [WalkDone, Outputs] and not setup.outbox.is_waiting
    ((saved,), items) = setup.sent[1][1].saved, setup.sent[1][1].items
    assert (saved.handle, saved.place, saved.loop.iteration, items) == (7, "LLM:4/denoise", 8, [])
    ref = saved.loop.values["latents"]
    assert ref.dtype == "bfloat16" and ref.data == halves.view(torch.uint16).numpy().tobytes()


def test_a_state_that_has_no_room_or_no_receiver_is_dropped_and_its_request_goes_on(setup: Setup) -> None:
    setup.transport.is_full = True
    setup.outbox.saved(7, "LLM:4/denoise", 8, {"latents": torch.ones(2)})
    setup.finish()
    setup.outbox.flush()
    setup.transport.is_full, setup.transport.lends = False, True
    setup.stalled = {"api"}
    setup.outbox.saved(7, "LLM:4/denoise", 12, {"latents": torch.ones(2)})
    setup.finish()
    setup.outbox.flush()
    assert setup.sent == [] and setup.transport.lent == [] and not setup.outbox.is_waiting


def test_later_turns_wait_behind_one_that_copies(setup: Setup) -> None:
    setup.outbox.output(7, 0, "pcm", "audio", torch.ones(2), {})
    setup.outbox.flush()
    setup.outbox.walk_done(WalkDone(handle=7, run=1, rank=0))
    setup.outbox.flush()
    assert setup.sent == []
    setup.finish()
    setup.outbox.flush()
    assert setup.kinds == [Outputs, WalkDone]


def test_a_stream_item_keeps_its_place_among_control_messages(setup: Setup) -> None:
    setup.outbox.stream_tensor(1, "hidden", 7, 0, torch.ones(2))
    setup.outbox.walk_done(WalkDone(handle=7, run=1, rank=0))
    setup.finish()
    setup.outbox.flush()
    assert setup.kinds == [StreamTensor, WalkDone]


def test_a_value_without_room_fails_its_request_alone(setup: Setup) -> None:
    setup.outbox.value(1, 7, 1, 0, "features", [], torch.ones(1 << 21))
    setup.outbox.value(1, 8, 1, 0, "absent", [], None)
    setup.transport.is_full = True
    setup.finish()
    setup.outbox.flush()
    setup.outbox.flush()
    assert setup.kinds == [Values, WorkFailed]
    assert [item.handle for item in setup.sent[0][1].items] == [8]
    assert setup.sent[1][1].handle == 7


def test_results_that_the_api_does_not_read_fail_their_requests_and_keep_no_loan(setup: Setup) -> None:
    setup.transport.lends = True
    setup.stalled = {"api"}
    setup.outbox.output(7, 0, "pcm", "audio", torch.ones(2), {})
    setup.outbox.finished(8, 0, {}, 0)
    setup.outbox.walk_done(WalkDone(handle=8, run=1, rank=0, is_told=True))
    setup.outbox.walk_done(WalkDone(handle=9, run=1, rank=0))
    setup.finish()
    setup.outbox.flush()
    assert [(name, type(message), message.handle) for name, message in setup.sent] == [
        ("conductor", WalkDone, 9),
        ("conductor", WorkFailed, 7),
        ("conductor", WorkFailed, 8),
    ], "the conductor never takes a request without its results for finished"
    assert setup.sent[-1][1].error.code == "peer_stalled" and setup.sent[-1][1].error.status == 503
    assert not setup.transport.lent


def test_values_that_a_rank_does_not_read_fail_their_requests_alone(setup: Setup) -> None:
    setup.transport.lends = True
    setup.stalled = {"worker-1"}
    setup.outbox.value(1, 7, 1, 0, "features", [], torch.ones(2))
    setup.finish()
    setup.outbox.stream_tensor(1, "hidden", 8, 0, torch.ones(2))
    setup.finish()
    setup.outbox.stream_id(1, "ids", 9, 0, 3)
    setup.outbox.value(2, 6, 1, 0, "absent", [], None)
    setup.outbox.flush()
    assert setup.kinds == [Values, WorkFailed, WorkFailed, WorkFailed]
    assert sorted(message.handle for _, message in setup.sent[1:]) == [7, 8, 9]
    assert not setup.transport.lent


def test_messages_to_a_process_that_has_ended_fail_nothing_and_keep_no_loan(setup: Setup) -> None:
    """Its death decides about the requests: another attempt may follow."""
    setup.transport.lends = True
    setup.gone = {"api", "worker-1"}
    setup.outbox.output(7, 0, "pcm", "audio", torch.ones(2), {})
    setup.finish()
    setup.outbox.value(1, 8, 1, 0, "features", [], torch.ones(2))
    setup.finish()
    setup.outbox.flush()
    assert setup.sent == [] and not setup.transport.lent


def test_streams_go_on_while_shared_memory_is_full(setup: Setup) -> None:
    setup.transport.lends = setup.transport.is_full = True
    for number in range(9):
        setup.outbox.output(number, 0, "image", "image", torch.full((1 << 18,), number), {})  # 2 MiB each
        setup.finish()
    setup.outbox.finished(8, 1, {}, 0)
    setup.outbox.flush()
    assert set(setup.kinds) == {Outputs}
    sent = [message for _, message in setup.sent]
    assert [[item.handle for item in message.items] for message in sent] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert all(int(inline_array(item.ref)[0]) == item.handle for message in sent for item in message.items)
    assert [len(message.finished) for message in sent] == [0, 0, 1], "the end comes with the last outputs"


def test_only_receivers_of_the_same_host_get_times_of_its_clock(setup: Setup) -> None:
    setup.elsewhere.add("worker-2")
    for rank in (1, 2):
        setup.outbox.stream_id(rank, "ids", 7, 0, 5)
        setup.outbox.value(rank, 7, 1, 0, "features", [], None)
        setup.outbox.stream_tensor(rank, "codes", 7, 0, torch.zeros(2))
        setup.finish()
    setup.outbox.flush()
    sent = {name: [message.sent for to, message in setup.sent if to == name] for name in ("worker-1", "worker-2")}
    assert len(sent["worker-1"]) == 3 and all(sent["worker-1"])
    assert sent["worker-2"] == [0.0] * 3


SMALL = 256 * 1024
"""Largest tensor inside a message to another host."""


def is_sendable(message: Any) -> bool:
    """Whether a message is below the limit of the courier."""
    return len(WireCodec("worker-0", 1).encode(message)) <= MESSAGE_BYTES


def test_a_step_with_100_small_tensors_goes_in_messages_below_the_limit(setup: Setup) -> None:
    setup.elsewhere.update(("api", "worker-1"))
    for number in range(100):
        setup.outbox.output(number, 0, "image", "image", torch.full((SMALL,), number, dtype=torch.uint8), {})
        setup.finish()
        setup.outbox.value(1, number, 1, 0, "features", [], torch.full((SMALL,), number, dtype=torch.uint8))
        setup.finish()
        setup.outbox.saved(number, "LLM:4/denoise", 8, {"latents": torch.full((SMALL,), number, dtype=torch.uint8)})
        setup.finish()
    setup.outbox.finished(99, 1, {}, 0)
    setup.outbox.flush()
    sent = [message for _, message in setup.sent]
    assert all(map(is_sendable, sent)) and set(setup.kinds) == {Outputs, Values}
    outputs = [message for message in sent if isinstance(message, Outputs)]
    values = [item for message in sent if isinstance(message, Values) for item in message.items]
    assert [item.handle for message in outputs for item in message.items] == list(range(100))
    assert [item.handle for item in values] == list(range(100))
    assert [saved.handle for message in outputs for saved in message.saved] == list(range(100))
    assert [end.handle for end in outputs[-1].finished] == [99]
    assert all(item.ref.data == bytes([item.handle]) * SMALL for item in values)


def test_a_cache_and_a_saved_state_of_many_small_tensors_lend_what_has_no_room_in_the_message(setup: Setup) -> None:
    pages = [torch.ones(SMALL, dtype=torch.uint8) for _ in range(100)]
    state = CacheState(
        length=3, position=3, last=1, drawn=1, pages=tuple(pages), history=torch.zeros(3, dtype=torch.int32)
    )
    setup.outbox.cache(Move("LLM", "", 1), 7, 1, state, {}, {})
    setup.outbox.saved(7, "LLM:4/denoise", 8, {f"v{number}": page for number, page in enumerate(pages)})
    for copy in setup.copies:
        copy.finish()
    setup.outbox.flush()
    sent = [message for _, message in setup.sent]
    assert set(setup.kinds) == {CacheMoved, Outputs} and all(map(is_sendable, sent))
    moved = next(message for message in sent if isinstance(message, CacheMoved))
    (saved,) = next(message for message in sent if isinstance(message, Outputs)).saved
    assert len(moved.pages) == len(saved.loop.values) == 100
    for refs in (moved.pages, list(saved.loop.values.values())):
        inside = [isinstance(ref, InlineTensor) for ref in refs]
        assert inside == sorted(inside, reverse=True) and 0 < sum(inside) < 100
