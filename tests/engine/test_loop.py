"""A loop that an engine iterates: starting values, carried values, emissions and its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.loop import EngineLoop, starting_values
from mstar_core.errors import EngineError


def loop(limit: int = 3, start: float = 0.0, **fields: Any) -> EngineLoop:
    spec = LoopSpec(max_iters=limit, carry={"state": "before"}, **fields)
    job = Job(key=JobKey(1), handle=Handle(1), outputs=("state", "score"), loop=spec)
    return EngineLoop(job=job, spec=spec, limit=limit, carried={"before": torch.tensor(start)})


def outputs(value: float) -> dict[str, torch.Tensor]:
    return {"state": torch.tensor(value), "score": torch.tensor(-value), "other": torch.tensor(0.0)}


def test_a_loop_ends_at_its_limit_with_the_outputs_of_its_last_iteration() -> None:
    running = loop(limit=2)
    assert running.end_at_start() is None
    assert running.advance(outputs(1.0), "node") == (None, None)
    assert {port: float(value) for port, value in running.carried.items()} == {"before": 1.0}
    _, done = running.advance(outputs(2.0), "node")
    assert done is not None and (done.reason, done.iterations) == ("length", 2)
    assert {port: float(value) for port, value in done.outputs.items()} == {"state": 2.0, "score": -2.0}
    assert {port: float(value) for port, value in running.values.items()} == {"state": 2.0}


def test_each_iteration_emits_the_ports_that_it_gave() -> None:
    running = loop(emit=("score", "absent"))
    for iteration in range(3):
        emission, _ = running.advance(outputs(float(iteration)), "node")
        assert emission is not None and emission.iteration == iteration
        assert {port: float(value) for port, value in emission.outputs.items()} == {"score": -float(iteration)}


@pytest.mark.parametrize(("limit", "start", "reason"), [(0, 0.0, "length"), (3, 1.0, "stop"), (0, 1.0, "stop")])
def test_a_loop_that_may_not_iterate_ends_with_its_starting_value(limit: int, start: float, reason: str) -> None:
    done = loop(limit, start, stop_port="state").end_at_start()
    assert done is not None and (done.reason, done.iterations) == (reason, 0)
    assert {port: float(value) for port, value in done.outputs.items()} == {"state": start}


def test_a_stop_port_that_is_not_carried_ends_the_loop_too() -> None:
    running = loop(stop_port="other")
    _, done = running.advance(outputs(1.0) | {"other": torch.tensor(True)}, "node")
    assert done is not None and (done.reason, done.iterations) == ("stop", 1)


def test_a_missing_carried_port_is_an_error_that_names_it() -> None:
    with pytest.raises(EngineError, match="node did not give 'state'"):
        loop().advance({"score": torch.tensor(0.0)}, "node")


def test_a_loop_starts_from_its_inputs_else_from_the_last_values() -> None:
    spec, last = LoopSpec(max_iters=1, carry={"state": "before", "score": "bias"}), {"score": torch.tensor(5.0)}
    values = starting_values(spec, {"before": 4.0}, last, lambda into, value: torch.as_tensor(value), "node")
    assert {port: float(value) for port, value in values.items()} == {"before": 4.0, "bias": 5.0}
    with pytest.raises(EngineError, match="nothing to start from"):
        starting_values(spec, {}, last, lambda into, value: torch.as_tensor(value), "node")
