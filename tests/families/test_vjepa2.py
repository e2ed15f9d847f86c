"""Programs and parameters of both V-JEPA 2 models against their specification."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mstar_core.errors import RequestError
from mstar_core.graph import CLIENT, GraphEdge, graph_nodes, loops
from mstar_core.plugin import Run, parse_params
from mstar_core.plugin.check.dry_run import sample_request
from mstar_vjepa2.params import ActionParams, Params
from tests.families.families import SPECS, sample_of, told, wishes

MOVE = [0.0] * 7

BASE = {
    "encode": "encode",
    "encode, pooled": "encode",
    "encode, two layers": "encode",
    "encode, attentive": "classify",
    "classify": "classify",
    "predict": "predict",
    "predict, as video": "predict_video",
    "rollout": "rollout",
    "rollout, earlier names": "rollout_video",
    "encode, earlier name": "encode_video",
}
AC = {
    "encode": ["encode"],
    "predict": ["predict"],
    "rollout": ["rollout"],
    "rollout, given states": ["rollout"],
    "rollout, last frame": ["rollout_final"],
    "rollout, three context frames": ["prefill_context", "rollout"],
    "rollout, scored": ["rollout_scored"],
    "rollout, scored, last frame": ["rollout_scored_final"],
    "rollout, many candidates": ["rollout_energies"],
    "rollout, earlier names": ["rollout_scored_video"],
    "encode, as video": ["encode_video"],
    "predict, as video": ["predict_video"],
    "rollout, as video": ["rollout_video"],
    "plan": ["plan"],
    "plan, told": ["plan_told"],
    "plan, earlier frames": ["prefill_context", "plan"],
}


@pytest.mark.parametrize("sample", [sample.name for sample in SPECS["vjepa2"].samples])
def test_each_base_task_takes_its_walk(sample: str) -> None:
    assert told(wishes("vjepa2", sample)["main"]) == [BASE[sample]]


@pytest.mark.parametrize("sample", [sample.name for sample in SPECS["vjepa2_ac"].samples])
def test_each_action_task_takes_its_walks(sample: str) -> None:
    assert told(wishes("vjepa2_ac", sample)["main"]) == AC[sample]


def last_run(model: str, sample: str) -> Run:
    run = wishes(model, sample)["main"][-1]
    assert isinstance(run, Run)
    return run


def test_horizon_and_candidates_come_from_the_request() -> None:
    assert last_run("vjepa2", "rollout").max_iters == 4
    rollout = last_run("vjepa2_ac", "rollout, three context frames")
    assert (rollout.max_iters, rollout.rows) == (2, 3)
    assert last_run("vjepa2_ac", "rollout, many candidates").rows == 64


def test_candidates_that_are_scored_are_counted_with_all_their_frames_before_they_begin() -> None:
    """The others take turns: their frames go with their share of the rollout."""
    for sample in ("rollout, many candidates", "rollout, scored"):
        run = last_run("vjepa2_ac", sample)
        assert run.row_passes == run.max_iters, sample
    for sample in ("rollout, three context frames", "plan"):
        assert last_run("vjepa2_ac", sample).row_passes == 0, sample


def test_who_asks_for_video_gets_the_latents_of_many_candidates_too() -> None:
    many = sample_of("vjepa2_ac", "rollout, many candidates")
    request = sample_request(SPECS["vjepa2_ac"], replace(many, outputs=frozenset({"video", "scalar"})))
    ((run,),) = SPECS["vjepa2_ac"].partitions[0].program(request)
    assert run.walk == "rollout_scored_video"


def test_a_plan_rolls_every_sample_out_in_every_planning_step() -> None:
    plan = last_run("vjepa2_ac", "plan")
    assert plan.rows == 400
    assert plan.max_iters == {"cem_loop": 10, "rollout_loop": 2}


def test_context_frames_are_read_once_before_the_candidates() -> None:
    context = wishes("vjepa2_ac", "rollout, three context frames")["main"][0]
    assert isinstance(context, Run)
    assert (context.max_iters, context.rows) == (2, 1)


def test_a_frame_is_one_page_and_a_rollout_leaves_nothing_behind() -> None:
    graph = SPECS["vjepa2_ac"]
    predictor = graph.node("ac_predictor")
    assert predictor.kv is not None
    assert predictor.kv.page == 258
    for name in graph.partitions[0].walks:
        uses = [use.attend for use in graph_nodes(graph.walk(name)[1]) if use.spec == predictor]
        for attend in uses:
            assert attend is not None
            assert (attend.mask, attend.positions, attend.tokens) == ("full", "shared", 258)
            assert (attend.keep == "request") == (name == "prefill_context"), name


@pytest.mark.parametrize(
    ("walk", "each", "last"),
    [
        ("rollout", {"next_frame", "next_state"}, set()),
        ("rollout_final", {"next_state"}, {"next_frame"}),
        ("rollout_scored", {"next_frame", "next_state", "energies"}, {"best_index"}),
        ("rollout_scored_final", {"next_state", "energies"}, {"next_frame", "best_index"}),
        ("rollout_energies", {"next_state", "energies"}, {"best_index"}),
        ("rollout_video", {"next_frame"}, set()),
        ("rollout_scored_video", {"next_frame", "energies"}, {"best_index"}),
    ],
)
def test_a_rollout_sends_what_is_wanted_and_no_more(walk: str, each: set[str], last: set[str]) -> None:
    found = SPECS["vjepa2_ac"].walk(walk)[1]
    (loop,) = loops(found)

    def sent(edges: object) -> set[str]:
        return {edge.port for edge in edges if isinstance(edge, GraphEdge) and edge.to == CLIENT}  # type: ignore[attr-defined]

    assert {port for use in graph_nodes(found) for port in sent(use.outputs)} == each
    assert sent(loop.outputs) == last


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"num_frames": 16, "fps": 2}, "fps"),
        ({"context_mask": [0, 1]}, "target_mask"),
        ({"context_mask": [], "target_mask": [1]}, "context_mask"),
        ({"context_mask": [-1], "target_mask": [1]}, "context_mask"),
        ({"return": ["pixels"]}, "return"),
        ({"output_format": "npy", "output_dtype": "bfloat16"}, "output_dtype"),
        ({"actions": [MOVE]}, "actions"),
        ({"task": "plan"}, "task"),
    ],
)
def test_wrong_base_values_name_their_field(given: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_params(Params, given)
    assert error.value.field == field


ROLL = {"task": "rollout", "actions": [MOVE] * 4, "states": [MOVE]}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"actions": [[0.0] * 6]}, "actions"),
        ({"actions": [[0.0] * 7, [0.0] * 6]}, "actions"),
        ({"actions": [[float("inf")] * 7]}, "actions"),
        ({"actions": []}, "actions"),
        ({"task": "rollout", "states": [MOVE]}, "actions"),
        ({"task": "rollout", "actions": [MOVE]}, "states"),
        ({**ROLL, "horizon": 5}, "actions"),
        ({**ROLL, "context_frames": 250, "horizon": 10}, "horizon"),
        ({"task": "plan", "topk": 50, "samples": 20}, "topk"),
        ({"task": "plan", "topk": 1}, "topk"),
        ({"task": "plan", "axis": {"roll": 0.0}}, "axis"),
        ({"task": "plan", "axis": [0.0]}, "axis"),
        ({"task": "plan", "noise": [[[[0.0] * 4]]]}, "noise"),
        ({"task": "classify"}, "task"),
        ({**ROLL, "states": [MOVE] * 2}, "states"),
        ({**ROLL, "state_mode": "given"}, "states"),
        ({**ROLL, "horizon": 2, "rollout_horizon": 3}, "rollout_horizon"),
    ],
)
def test_wrong_action_values_name_their_field(given: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_params(ActionParams, given)
    assert error.value.field == field


def test_planning_defaults() -> None:
    made = parse_params(ActionParams, {"task": "plan"}).params
    assert (made.samples, made.topk, made.cem_steps, made.maxnorm, made.plan_steps, made.seed) == (
        400,
        10,
        10,
        0.05,
        2,
        0,
    )
    momenta = {made.momentum_mean, made.momentum_std, made.momentum_mean_gripper, made.momentum_std_gripper}
    assert momenta == {0.15}


@pytest.mark.parametrize(
    ("given", "outputs", "task"),
    [
        ({}, {"tensor"}, "encode"),
        ({}, {"video", "tensor"}, "predict"),
        ({"skip_predictor": True}, {"video"}, "encode"),
        ({"rollout_horizon": 4}, {"video"}, "rollout"),
        ({"rollout_horizon": 1}, {"video"}, "predict"),
        ({"task": "encode", "rollout_horizon": 4}, {"video"}, "encode"),
    ],
)
@pytest.mark.parametrize("params", [Params, ActionParams])
def test_earlier_names_choose_the_task(params: type, given: dict[str, object], outputs: set[str], task: str) -> None:
    assert parse_params(params, given).params.chosen_task(frozenset(outputs)) == task
