"""Outgoing messages: tensors on a GPU are copied without blocking, and messages keep their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mstar_core.errors import ArenaFull
from mstar_core.messages.flow import Outputs, StreamTensor, Values
from mstar_core.messages.work import WalkDone, WorkFailed
from mstar_core.transport.tensors import inline, inline_array
from mstar_core.worker.outbox import Outbox


class Transport:
    is_full = False

    def put(self, array: Any, to: str, *, dtype: str | None = None) -> Any:
        if self.is_full:
            raise ArenaFull("no room")
        return inline(array, dtype)


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
        self.transport = Transport()
        self.outbox = Outbox("worker-0", 0, self, self.transport, self.copy)  # type: ignore[arg-type]

    def send(self, name: str, message: Any) -> bool:
        self.sent.append((name, message))
        return True

    def copy(self, tensor: torch.Tensor) -> Copy:
        self.started = Copy(tensor)
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
    setup.outbox.value(1, 7, 1, 0, "features", [], torch.ones(2))
    setup.outbox.value(1, 8, 1, 0, "absent", [], None)
    setup.transport.is_full = True
    setup.finish()
    setup.outbox.flush()
    setup.outbox.flush()
    assert setup.kinds == [Values, WorkFailed]
    assert [item.handle for item in setup.sent[0][1].items] == [8]
    assert setup.sent[1][1].handle == 7
