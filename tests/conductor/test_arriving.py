"""Inputs that grow while their request runs: a program gets what has arrived, and waits for more."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from mstar_core.conductor.conductor import Conductor
from mstar_core.conformance.clock import FakeClock
from mstar_core.messages.life import PeerReady
from mstar_core.messages.requests import GrowingInput, MoreInput, NewRequest, RequestFailed, Resume
from mstar_core.messages.tensors import InlineTensor
from mstar_core.messages.work import EndStream, RunWalk, RunWalks, WalkDone
from mstar_core.plugin import Partition, ProgramRequest, Receive, Run
from mstar_core.plugin.program import ProgramGenerator
from tests.conductor.test_conductor import MODEL, placed
from tests.conductor.test_conductor import request as whole_request
from tests.fakes.courier import FakeCourier


def read(request: ProgramRequest) -> ProgramGenerator:
    """Read each piece of the text by a prefill."""
    while numbers := (yield Receive("text")):
        yield Run("prefill", tokens=numbers)


TALK, SING = MODEL.partitions
GROWS = replace(MODEL, partitions=(Partition(name="talk", program=read, walks=TALK.walks), SING))


def request(handle: int = 1, values: Sequence[int] = (), *, is_over: bool = False, **more: Any) -> NewRequest:
    growing = {"text": GrowingInput(values=list(values), is_over=is_over)}
    return msgspec.structs.replace(whole_request(handle), growing=growing, **more)


def more(values: Sequence[int] = (), *, handle: int = 1, name: str = "text", is_over: bool = False) -> MoreInput:
    return MoreInput(handle=handle, name=name, values=list(values), is_over=is_over)


class Deployment:
    """A conductor, and what it sends to the rank that reads."""

    def __init__(self, *, ready: bool = True) -> None:
        self.post = FakeCourier()
        self.conductor = Conductor(GROWS, placed((0,), codec=1), self.post, max_seq_len=64, clock=FakeClock())
        if ready:
            self.start()

    def start(self) -> None:
        for rank in (0, 1):
            self.conductor.on(PeerReady(name=f"worker-{rank}", incarnation=1))

    def on(self, message: Any) -> list[list[int]]:
        """Return the pieces that are read after a message."""
        self.conductor.on(message)
        self.sent = [message for _, message in self.post.take()]
        runs = [
            run for each in self.sent if isinstance(each, RunWalks) and each.partition == "talk" for run in each.runs
        ]
        if runs:
            self.run = runs[-1].run
        return [numbers(run) for run in runs]

    def done(self) -> list[list[int]]:
        """Report the last run."""
        return self.on(WalkDone(handle=1, run=self.run, rank=0, streamed={"ids": 1}))


def numbers(run: RunWalk) -> list[int]:
    ref = run.inputs["tokens"]
    assert isinstance(ref, InlineTensor) and ref.dtype == "int64"
    return list(struct.unpack(f"<{ref.shape[0]}q", ref.data))


def test_a_program_gets_pieces_in_order_and_then_the_end() -> None:
    deployment = Deployment()
    assert deployment.on(request()) == []
    assert deployment.on(more([1, 2])) == [[1, 2]]
    assert deployment.on(more([3])) == [] == deployment.on(more([4, 5])), "the run before has not ended"
    assert deployment.done() == [[3, 4, 5]]
    assert deployment.done() == []
    assert deployment.on(more([6], is_over=True)) == [[6]]
    assert deployment.done() == []
    assert any(isinstance(message, EndStream) for message in deployment.sent), "the end of the input ends the program"


def test_a_request_begins_with_what_is_known() -> None:
    deployment = Deployment()
    assert deployment.on(request(values=[7, 8], is_over=True)) == [[7, 8]]
    deployment.done()
    assert any(isinstance(message, EndStream) for message in deployment.sent)


def test_a_request_that_waits_for_a_replica_keeps_what_arrives() -> None:
    deployment = Deployment(ready=False)
    deployment.on(request(values=[1], resume=Resume(attempt=2)))
    assert deployment.on(more([2, 3])) == [] == deployment.on(more(is_over=True))
    assert deployment.on(PeerReady(name="worker-1", incarnation=1)) == []
    assert deployment.on(PeerReady(name="worker-0", incarnation=1)) == [[1, 2, 3]]
    deployment.done()
    assert any(isinstance(message, EndStream) for message in deployment.sent)


@pytest.mark.parametrize("handle", [1, 2])
def test_an_unknown_input_fails_its_request_alone(handle: int) -> None:
    deployment = Deployment()
    deployment.on(request(1))
    deployment.on(request(2))
    deployment.on(more([1], handle=handle, name="words"))
    failed = [message for message in deployment.sent if isinstance(message, RequestFailed)]
    assert [(each.handle, "does not grow" in each.error.message) for each in failed] == [(handle, True)]
    assert deployment.on(more([1], handle=9)) == [] and deployment.conductor.unknown == 1


def test_a_program_cannot_wait_for_an_input_that_does_not_grow() -> None:
    deployment = Deployment()
    deployment.on(whole_request())
    (failed,) = [message for message in deployment.sent if isinstance(message, RequestFailed)]
    assert "does not grow" in failed.error.message


def test_a_request_that_only_reads_ends_before_it_waits() -> None:
    deployment = Deployment()
    assert deployment.on(request(values=[1], reads_only=True)) == []
    assert not deployment.conductor.requests
