"""Durations of steps: they never add up to more than the time that passed, and name the jobs that they ran."""

from __future__ import annotations

import pytest
import torch

from mstar_core.conformance.clock import FakeClock
from mstar_core.engine.base import Handle, Job, JobKey
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.worker.telemetry.tracing import jobs_of
from tests.engine.test_stateless_running import SPEC, Both
from tests.engine.tiny_engine import Driver, make_engine, prompt


@pytest.mark.parametrize("lookahead", [0, 1])
def test_steps_of_a_language_model_do_not_count_twice(lookahead: int) -> None:
    clock = FakeClock(0.0, tick=1.0)
    driver = Driver(make_engine(lookahead=lookahead, clock=clock, token_budget=8), lookahead)
    for handle in range(2):
        driver.open(handle)
        driver.prefill(handle, prompt(handle, 20))
    driver.run()
    for handle in range(2):
        driver.decode(handle, 12)
    driver.run()
    durations = [result.duration_s for result in driver.results]
    assert len(durations) > 12 and all(duration > 0 for duration in durations)
    assert sum(durations) <= clock.now
    assert {key for result in driver.results for key in jobs_of(result)} == {1, 2, 3, 4}
    assert sum(1 in jobs_of(result) for result in driver.results) >= 3, "each chunk of a prompt is part of its job"


def test_a_step_behind_another_begins_when_that_one_ends() -> None:
    now = [0.0]
    device, dtype = torch.device("cpu"), torch.float32
    engine = StatelessEngine(SPEC, Both(), device=device, dtype=dtype, lookahead=1, clock=lambda: now[0])
    steps = []
    for number in (1, 2):
        engine.open(Handle(number), SamplingParams(), 0)
        key, inputs = JobKey(number), {"x": torch.ones(2)}
        engine.submit(Job(key=key, handle=Handle(number), inputs=inputs, outputs=("z",)))
        now[0] = float(number)
        steps.append(engine.launch())
    now[0] = 4.0
    assert steps[0] is not None and steps[1] is not None
    assert engine.collect(steps[0]).duration_s == 3.0
    now[0] = 5.0
    second = engine.collect(steps[1])
    assert (second.duration_s, second.ran) == (1.0, [2])
