"""The stop rule of a loop, which workers and engines apply to the same values."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from mstar_core.engine.base import LoopSpec
from mstar_core.engine.loop import stops as engine_stops
from mstar_core.graph.declare.walks import StopOn
from mstar_core.worker.state import values


class Request:
    """A request without parameters."""

    params: dict[str, Any] = {}  # noqa: RUF012 read only


@pytest.mark.parametrize(("value", "is_end"), [([7], True), ([3, 7, 4], True), ([7, 4], True), ([3, 4], False)])
def test_an_id_at_any_place_of_a_value_ends_a_loop_of_the_worker_and_of_the_engine(
    value: list[int], is_end: bool
) -> None:
    tensor = torch.tensor(value)
    loop = LoopSpec(max_iters=4, stop_port="ids", stop_ids=(7,))
    assert engine_stops(loop, tensor) is is_end
    assert values.stops(cast("Any", Request()), StopOn("ids", (7,)), tensor) is is_end
