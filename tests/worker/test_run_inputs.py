"""Inputs of runs in the memory of another host: runs wait for them, in order, and a closed request drops them."""

from __future__ import annotations

import numpy as np
import torch

from mstar_core.engine.base import Handle
from mstar_core.errors import TransportError
from mstar_core.messages.requests import SavedLoop
from mstar_core.messages.tensors import ShmTensor, TensorRef
from mstar_core.messages.work import WalkDone, WorkFailed
from mstar_core.worker.incoming.reads import Incoming
from mstar_core.worker.incoming.run_inputs import RunInputs
from tests.worker.test_executor import STOP, Bench, ids


class Far:
    """Reads of another host that end when the test says so. begun: as often as each was begun and not taken."""

    must_poll = False

    def __init__(self) -> None:
        self.begun: list[TensorRef] = []
        self.came: dict[int, torch.Tensor | TransportError] = {}

    @property
    def reading(self) -> int:
        return len(self.begun)

    def reads(self, ref: TensorRef) -> bool:
        return isinstance(ref, ShmTensor)

    def begin(self, ref: TensorRef) -> None:
        self.begun.append(ref)

    def is_ready(self, ref: TensorRef) -> bool:
        return slot_of(ref) in self.came

    def failure(self, ref: TensorRef) -> TransportError | None:
        found = self.came.get(slot_of(ref))
        return found if isinstance(found, TransportError) else None

    def take(self, ref: TensorRef) -> torch.Tensor:
        self.begun.remove(ref)
        found = self.came[slot_of(ref)]
        assert isinstance(found, torch.Tensor)
        return found

    def drop(self, ref: TensorRef) -> None:
        self.begun.remove(ref)


def slot_of(ref: TensorRef) -> int:
    assert isinstance(ref, ShmTensor)
    return ref.slot


def lent(slot: int) -> ShmTensor:
    return ShmTensor(dtype="int64", shape=(5,), owner="api", offset=0, size_bytes=40, slot=slot, generation=1)


def bench_with(far: Far) -> Bench:
    bench = Bench({1: [*ids(3), STOP]})
    bench.executor._incoming = incoming = Incoming([far])
    bench.executor.inputs = RunInputs(incoming)
    bench.open(1)
    return bench


def turns(bench: Bench) -> int:
    began = bench.executor.begin_with_inputs()
    bench.turns()
    return began


def done(bench: Bench) -> list[int]:
    return [each.run for each in bench.post.of(WalkDone)]


def test_a_run_begins_when_its_inputs_have_come_and_later_ones_wait_behind_it() -> None:
    far, tokens = Far(), torch.arange(5)
    bench = bench_with(far)
    bench.walk(1, "LLM", 1, "prefill", inputs={"tokens": lent(1)})
    bench.walk(1, "LLM", 2, "prefill", inputs={"tokens": lent(2)})
    assert len(far.begun) == 2, "both are on their way"
    far.came[2] = tokens
    assert turns(bench) == 0 and not done(bench) and not bench.lm.seen
    far.came[1] = tokens
    assert turns(bench) == 1
    turns(bench)
    assert done(bench) == [1, 2]
    assert not far.reading and not bench.executor.inputs.waiting


def test_an_input_that_several_runs_use_is_read_for_each() -> None:
    far = Far()
    bench = bench_with(far)
    far.came[1] = torch.arange(5)
    for run in (1, 2):
        bench.walk(1, "LLM", run, "prefill", inputs={"tokens": lent(1)})
    turns(bench)
    assert done(bench) == [1, 2] and not far.reading


def test_an_input_that_cannot_be_read_fails_its_request() -> None:
    far = Far()
    bench = bench_with(far)
    bench.walk(1, "LLM", 1, "prefill", inputs={"tokens": lent(1)})
    far.came[1] = TransportError("a tensor of another host does not arrive")
    turns(bench)
    [failed] = bench.post.of(WorkFailed)
    assert failed.error.code == "transport" and Handle(1) not in bench.executor.requests
    assert not far.reading


def test_a_closed_request_drops_what_it_waits_for() -> None:
    far = Far()
    bench = bench_with(far)
    bench.walk(1, "LLM", 1, "prefill", inputs={"tokens": lent(1)})
    assert far.reading and bench.executor.inputs.waiting
    bench.executor.close(Handle(1))
    far.came[1] = torch.arange(5)
    turns(bench)
    assert not far.reading and not bench.executor.inputs.waiting and not done(bench)


def test_a_run_waits_for_the_saved_states_of_its_loops() -> None:
    far, tokens = Far(), torch.arange(5)
    bench = bench_with(far)
    state = SavedLoop(iteration=4, values={"x": lent(2)})
    bench.walk(1, "LLM", 1, "prefill", inputs={"tokens": lent(1)}, saved={"loop": state})
    far.came[1] = tokens
    assert turns(bench) == 0 and not done(bench)
    far.came[2] = tokens
    assert turns(bench) == 1 and done(bench) == [1]
    bench.executor.close(Handle(1))
    assert not far.reading, "a state that fits no loop is dropped with its request"


def test_inputs_that_this_rank_does_not_use_are_not_read() -> None:
    far = Far()
    bench = bench_with(far)
    far.came[1] = torch.from_numpy(np.arange(5))
    bench.walk(1, "LLM", 1, "prefill", inputs={"tokens": lent(1), "others": lent(2)})
    turns(bench)
    assert done(bench) == [1] and not far.reading
