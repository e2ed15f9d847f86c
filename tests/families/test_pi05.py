"""Pi0.5's program, parameters and start-up options against its specification."""

from __future__ import annotations

import pytest

from mstar_core.errors import ConfigError, RequestError
from mstar_core.graph import Attend, graph_nodes
from mstar_core.plugin import Action, Run, parse_params
from mstar_pi05.params import Params
from tests.families.families import SPECS, loop_of, told, wishes


@pytest.mark.parametrize("sample", [sample.name for sample in SPECS["pi05"].samples])
def test_the_prefix_is_read_and_then_the_flow_runs(sample: str) -> None:
    assert told(wishes("pi05", sample)["main"]) == ["prefill", "action_gen"]


@pytest.mark.parametrize(("sample", "steps"), [("one camera", 10), ("three cameras", 4)])
def test_the_flow_takes_the_steps_asked_for(sample: str, steps: int) -> None:
    flow = wishes("pi05", sample)["main"][-1]
    assert isinstance(flow, Run)
    assert flow.max_iters == steps


def test_the_prefix_is_seen_whole_and_the_flow_adds_nothing_to_it() -> None:
    uses = {name: list(graph_nodes(SPECS["pi05"].walk(name)[1]))[-1].attend for name in ("prefill", "action_gen")}
    assert uses == {"prefill": Attend(mask="full"), "action_gen": Attend(mask="full", write=False)}
    assert loop_of("pi05", "action_gen", "flow").fused


def test_the_horizon_comes_from_the_deployment() -> None:
    assert SPECS["pi05"].output("action") == Action(horizon=50, dim=32)
    bound = SPECS["pi05"].bound(None, {"action_horizon": 15, "action_dim": 8})
    assert bound.output("action") == Action(horizon=15, dim=8)
    assert bound.node("LLM").ports["actions"] == "f32[15,32]"


@pytest.mark.parametrize("horizon", [0, -1, 1.5, "50", True])
def test_an_impossible_horizon_names_its_key(horizon: object) -> None:
    with pytest.raises(ConfigError, match="action_horizon"):
        SPECS["pi05"].bound(None, {"action_horizon": horizon})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"robot_state": [0.0] * 33}, "robot_state"),
        ({"robot_state": [float("nan")]}, "robot_state"),
        ({"robot_state": "joints"}, "robot_state"),
        ({"image_mask": [False, False]}, "image_mask"),
        ({"image_mask": [True] * 4}, "image_mask"),
        ({"noise": [[0.0] * 31] * 50}, "noise"),
        ({"noise": []}, "noise"),
        ({"num_steps": 0}, "num_steps"),
    ],
)
def test_wrong_values_name_their_field(given: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_params(Params, given)
    assert error.value.field == field
