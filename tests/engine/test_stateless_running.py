"""Steps of the stateless engine in flight, with events that the test sets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mstar_core.engine.base import Done, Emission, Failed, Handle, Job, JobKey, StepResult
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.engine.stateless.step import StatelessStep, stays
from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import STATELESS, NodeSpec
from mstar_core.graph.declare.sampling import SamplingParams

SPEC = NodeSpec(name="cameras", engine=STATELESS, ports={"x": "f32[n]", "y": "f32[n]", "z": "f32[n]"})
JOB = Job(key=JobKey(1), handle=Handle(0), inputs={}, outputs=("z",))


class Event:
    """The end of a step."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


def done(*ports: str) -> Done:
    return Done(job=JOB, outputs=dict.fromkeys(ports, torch.zeros(2)))


def running(before: Event | None, finished: Event, *, is_staying: bool = True) -> StatelessStep:
    return StatelessStep(StepResult(), 0.0, finished, is_staying, before)  # type: ignore[arg-type]


def test_one_step_that_stays_is_collected_before_its_end_and_a_second_after_the_first() -> None:
    first, second = Event(), Event()
    steps = [running(None, first), running(first, second)]
    assert [step.is_done for step in steps] == [True, False]
    first.is_over = True
    assert [step.is_done for step in steps] == [True, True]


def test_a_step_for_the_host_is_done_at_its_own_end() -> None:
    before, own = Event(), Event()
    step = running(before, own, is_staying=False)
    before.is_over = True
    assert not step.is_done
    own.is_over = True
    assert step.is_done


def test_only_a_step_of_nothing_but_device_outputs_stays() -> None:
    ports = frozenset({"z"})
    assert stays(StepResult(done=[done("z"), done("z")]), ports)
    assert not stays(StepResult(done=[done("z"), done("z", "y")]), ports)
    assert not stays(StepResult(done=[done("z")]), frozenset())


@pytest.mark.parametrize(
    "result",
    [
        StepResult(),
        StepResult(done=[done()]),
        StepResult(done=[done("z")], emissions=[Emission(job=JOB, iteration=0, outputs={"z": torch.zeros(2)})]),
        StepResult(done=[done("z")], failed=[Failed(job=JOB, error=EngineError("a row", "fails", node="cameras"))]),
    ],
    ids=["nothing", "no outputs", "emissions", "failures"],
)
def test_other_results_of_a_step_are_waited_for(result: StepResult) -> None:
    assert not stays(result, frozenset({"z"}))


class Both(nn.Module):
    """z is for nodes of the same device."""

    device_outputs = ("z",)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": 2 * x, "z": 3 * x}


@pytest.mark.parametrize(("outputs", "is_staying"), [(("z",), True), (("y", "z"), False), (("y",), False), ((), False)])
def test_a_step_stays_if_its_jobs_want_device_outputs_only(outputs: tuple[str, ...], *, is_staying: bool) -> None:
    engine = StatelessEngine(SPEC, Both(), device=torch.device("cpu"), dtype=torch.float32)
    engine.open(Handle(0), SamplingParams(), 0)
    engine.submit(Job(key=JobKey(1), handle=Handle(0), inputs={"x": torch.ones(2)}, outputs=outputs))
    step = engine.launch()
    assert step is not None and step.stays == is_staying
    assert set(engine.collect(step).done[0].outputs) == set(outputs)


def test_a_request_closed_during_its_step_gets_no_result() -> None:
    engine = StatelessEngine(SPEC, Both(), device=torch.device("cpu"), dtype=torch.float32)
    engine.open(Handle(0), SamplingParams(), 0)
    engine.submit(Job(key=JobKey(1), handle=Handle(0), inputs={"x": torch.ones(2)}, outputs=("z",)))
    step = engine.launch()
    assert step is not None and step.stays
    engine.close(Handle(0))
    assert not engine.collect(step).done
