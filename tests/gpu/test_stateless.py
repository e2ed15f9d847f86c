"""The stateless engine on CUDA: its own stream, what it waits for, and whom it keeps waiting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mstar_core.engine.base import Handle, Job, JobKey
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.graph.declare.nodes import STATELESS, NodeSpec
from mstar_core.graph.declare.sampling import SamplingParams

pytestmark = pytest.mark.gpu

SPEC = NodeSpec(name="codec", engine=STATELESS, ports={"x": "f32[n]", "y": "f32[n]", "z": "f32[n]"})
LONG = 100_000_000
"""Clock cycles, about 50 ms."""


class Slow(nn.Module):
    """y = 2 x, on the host; z = 3 x, on the device; both after a while."""

    host_outputs = ("y",)

    def __init__(self, cycles: int = LONG) -> None:
        super().__init__()
        self.cycles = cycles

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        torch.cuda._sleep(self.cycles)
        return {"y": 2 * x, "z": 3 * x}


class Staying(Slow):
    """z is for nodes of the same device."""

    device_outputs = ("z",)


def engine_of(cuda: torch.device, module: nn.Module) -> StatelessEngine:
    engine = StatelessEngine(SPEC, module, device=cuda, dtype=torch.float32, lookahead=1)
    for handle in range(8):
        engine.open(Handle(handle), SamplingParams(), 0)
    return engine


def warmed(cuda: torch.device, module: Slow) -> StatelessEngine:
    """An engine whose kernels have run once: loading one may wait for everything on the device."""
    engine, cycles = engine_of(cuda, module), module.cycles
    module.cycles = 0
    submit(engine, 7, torch.ones(4), ("y", "z"))
    running = engine.launch()
    assert running is not None
    assert (engine.collect(running).done[0].outputs["z"] + 1).tolist() == [4.0] * 4
    module.cycles = cycles
    return engine


def submit(engine: StatelessEngine, number: int, x: Tensor, outputs: tuple[str, ...] = ("y",)) -> None:
    engine.submit(Job(key=JobKey(number), handle=Handle(number), inputs={"x": x}, outputs=outputs))


def test_a_step_keeps_neither_the_host_nor_the_workers_stream_waiting(cuda: torch.device) -> None:
    engine, given = warmed(cuda, Slow()), torch.ones(4, device=cuda)
    torch.cuda.synchronize()
    submit(engine, 0, torch.ones(4))
    running = engine.launch()
    assert running is not None and not engine.is_done(running)
    beside = given + 1
    torch.cuda.current_stream().synchronize()
    assert not engine.is_done(running), "the worker's stream was through before the step"
    assert beside.tolist() == [2.0] * 4
    assert engine.collect(running).done[0].outputs["y"].tolist() == [2.0] * 4
    assert engine.is_done(running)


def test_a_step_waits_for_inputs_that_the_workers_stream_makes(cuda: torch.device) -> None:
    engine = engine_of(cuda, Slow(0))
    torch.cuda._sleep(LONG)
    submit(engine, 0, torch.full((1 << 20,), 5.0, device=cuda))
    running = engine.launch()
    assert running is not None
    assert bool((engine.collect(running).done[0].outputs["y"] == 10.0).all())


def test_a_large_input_from_the_host_does_not_wait_for_the_workers_stream(cuda: torch.device) -> None:
    """A clip on its way to the encoder, while a long rollout runs."""
    engine, clip = warmed(cuda, Slow(0)), torch.full((1 << 20,), 7.0)
    for number in range(1, 4):  # getting pinned memory may wait for the device
        submit(engine, number, clip)
        running = engine.launch()
        assert running is not None and engine.collect(running).done
    torch.cuda._sleep(4 * LONG)
    busy = torch.cuda.current_stream().record_event()
    submit(engine, 0, clip)
    running = engine.launch()
    assert running is not None
    assert bool((engine.collect(running).done[0].outputs["y"] == 14.0).all())
    assert not busy.query(), "the step waited for the worker's stream, or the host did"


def test_outputs_that_stay_on_the_device_are_there_for_the_workers_stream(cuda: torch.device) -> None:
    engine = engine_of(cuda, Slow())
    submit(engine, 0, torch.ones(4), ("y", "z"))
    running = engine.launch()
    assert running is not None
    kept = engine.collect(running).done[0].outputs["z"]
    assert kept.is_cuda
    assert (kept + 1).tolist() == [4.0] * 4


def test_results_hold_until_the_third_step_after(cuda: torch.device) -> None:
    engine = engine_of(cuda, Slow(0))
    found = []
    for number in range(3):
        submit(engine, number, torch.full((4,), float(number)))
        running = engine.launch()
        assert running is not None
        found.append(engine.collect(running).done[0].outputs["y"])
    assert [value.tolist() for value in found] == [[0.0] * 4, [2.0] * 4, [4.0] * 4]
    assert all(value.is_pinned() for value in found)


def test_a_step_for_the_device_alone_is_done_when_the_one_before_it_is(cuda: torch.device) -> None:
    engine = warmed(cuda, Staying())
    torch.cuda.synchronize()
    found = []
    for number in (0, 1):
        submit(engine, number, torch.full((4,), 1.0 + number), ("z",))
        running = engine.launch()
        assert running is not None
        assert engine.is_done(running) == (number == 0), "one step may be gone on with before it is there, not two"
        found.append(engine.collect(running).done[0].outputs["z"] + 1)
    assert not torch.cuda.current_stream().query(), "the host must not wait for either"
    assert [value.tolist() for value in found] == [[4.0] * 4, [7.0] * 4]


def test_a_step_that_is_for_the_host_as_well_is_waited_for(cuda: torch.device) -> None:
    engine = warmed(cuda, Staying())
    torch.cuda.synchronize()
    submit(engine, 0, torch.ones(4), ("y", "z"))
    running = engine.launch()
    assert running is not None and not engine.is_done(running)
    outputs = engine.collect(running).done[0].outputs
    assert (outputs["y"].tolist(), outputs["z"].tolist()) == ([2.0] * 4, [3.0] * 4)
