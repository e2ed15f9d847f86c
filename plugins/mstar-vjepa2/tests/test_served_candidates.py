"""Candidates and plans in both ways: the reference's numbers in any batch, and no repeated computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.nn.modules.module import register_module_forward_pre_hook

from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.nodes import RuntimeSettings
from mstar_core.conformance.runtime import LocalRuntime
from mstar_vjepa2.nodes.encoder import Encoder
from mstar_vjepa2.nodes.rotary import Rotary3D
from mstar_vjepa2.params import FEW_CANDIDATES

from .conftest import AC_SET, PLANS, SPECS, Golden, Ways, gap, npy
from .test_ac_predictor import ENERGY, ROLLED, STATE
from .test_served import ended, only, served, start

PLAN = 1e-5
"""Tolerance of a plan, its mean and its spread. Source: the golden folder's README."""

BOTH = ("tensor", "scalar")


def rolled(ac: Golden, name: str = "roll_actions", **more: Any) -> dict[str, Any]:
    """Return a rollout of all candidates of a golden case."""
    given = ac.given
    params = {"task": "rollout", "actions": given[name].tolist(), "states": given["roll_state0"][0].tolist()}
    return {**params, **more}


def goal(ac: Golden) -> Any:
    return ac.given["goal_latents"][0].tolist()


def by_candidate(values: list[Any]) -> np.ndarray:
    """Stack the values of each step, [K, ...], as [K, H, ...]."""
    return np.stack(values, axis=1)


def frames_of(outcome: Any) -> np.ndarray:
    return by_candidate(outcome.of("next_frame"))[:, :, 0]


def test_candidates_of_one_request_are_rolled_out_together(ac: Golden, ac_bench: Ways) -> None:
    expected = ac.expected
    outcome = ended(ac_bench, start(ac), outputs=BOTH, **rolled(ac, goal=goal(ac)))
    assert gap(frames_of(outcome), expected["roll_latents"]) < ROLLED
    assert gap(by_candidate(outcome.of("next_state")), expected["roll_states"][:, 1:]) < STATE
    energies = by_candidate(outcome.of("energies"))[..., 0]
    assert gap(energies, expected["roll_energies_per_step"]) < ENERGY
    assert gap(energies[:, -1], expected["roll_energies"]) < ENERGY
    assert only(outcome, "best_index").tolist() == [int(expected["roll_energies"].argmin())]
    steps = [item.meta["step"] for item in outcome.items if item.port == "next_frame"]
    assert steps == list(range(expected["roll_latents"].shape[1]))


def test_candidates_share_the_context_of_their_request(ac: Golden, ac_bench: Ways) -> None:
    inputs, expected, past = ac.given, ac.expected, ac.json("cases.json")["T0"]
    outcome = ended(
        ac_bench,
        start(ac, past),
        task="rollout",
        context_frames=past,
        actions=inputs["ctx_actions"].tolist(),
        states=inputs["ctx_states"][0].tolist(),
        goal=goal(ac),
    )
    assert gap(frames_of(outcome), expected["ctx_latents"]) < ROLLED
    assert gap(by_candidate(outcome.of("next_state")), expected["ctx_states"][:, past:]) < STATE
    assert gap(by_candidate(outcome.of("energies"))[..., 0], expected["ctx_energies_per_step"]) < ENERGY


def test_states_may_be_given_for_every_candidate(ac: Golden, ac_bench: Ways) -> None:
    inputs, expected = ac.given, ac.expected
    states = inputs["roll_given_states"][:, : inputs["roll_actions"].shape[1]].tolist()
    outcome = ended(ac_bench, start(ac), **rolled(ac, states=states, state_mode="given", goal=goal(ac)))
    assert gap(frames_of(outcome), expected["roll_given_latents"]) < ROLLED
    assert gap(by_candidate(outcome.of("energies"))[..., 0], expected["roll_given_energies_per_step"]) < ENERGY


@pytest.mark.parametrize("repeat", AC_SET.numbers("grid_energies_repeat"))
def test_a_landscape_of_many_candidates_is_told_by_energies(repeat: int, ac: Golden, ac_bench: Ways) -> None:
    actions = ac.given["grid_actions"].expand(-1, repeat, -1).tolist()
    outcome = ended(ac_bench, start(ac), **rolled(ac, actions=actions, goal=goal(ac)))
    energies = by_candidate(outcome.of("energies"))[..., 0]
    assert gap(energies[:, -1], ac.expected[f"grid_energies_repeat{repeat}"]) < ENERGY
    assert bool(outcome.of("next_frame")) == (len(actions) <= FEW_CANDIDATES), "latents of many are sent on request"


def test_each_candidate_may_start_from_a_pose_of_its_own(ac: Golden, ac_bench: Ways) -> None:
    inputs = ac.given
    actions, states = inputs["pose_action"].tolist(), inputs["pose"].tolist()
    outcome = ended(ac_bench, start(ac), **rolled(ac, actions=actions, states=states))
    assert gap(only(outcome, "next_state"), ac.expected["pose_next"][:, 0]) < STATE


def search(ac: Golden, name: str, **more: Any) -> dict[str, Any]:
    """Return the plan of a golden planner case."""
    params = ac.json(f"{name}_params.json")
    axes = {("x", "y", "z", "gripper")[int(axis)]: value for axis, value in params.pop("axis", {}).items()}
    named = {"task": "plan", "axis": axes, "horizon": params.pop("rollout"), "goal": goal(ac)}
    given = {"states": ac.given["roll_state0"][0].tolist(), "noise": ac.given[f"{name}_noise"].tolist()}
    return {**params, **named, **given, **more}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_that_of_the_official_planner(name: str, ac: Golden, ac_bench: Ways) -> None:
    expected = ac.expected
    outcome = ended(ac_bench, start(ac), **search(ac, name))
    assert gap(only(outcome, "actions"), expected[f"{name}_actions"]) < PLAN
    assert gap(only(outcome, "mean"), expected[f"{name}_mean"][-1]) < PLAN
    assert gap(only(outcome, "std"), expected[f"{name}_std"][-1]) < PLAN
    assert gap(only(outcome, "best_energy"), expected[f"{name}_energies"][-1:].min()[None]) < ENERGY


@pytest.mark.parametrize("name", PLANS)
def test_every_planning_step_can_be_followed(name: str, ac: Golden, ac_bench: Ways) -> None:
    expected = ac.expected
    outcome = ended(ac_bench, start(ac), **search(ac, name, **{"return": ["energies"]}))
    assert gap(np.stack(outcome.of("candidates")), expected[f"{name}_candidates"]) < PLAN
    assert gap(np.stack(outcome.of("energies"))[..., 0], expected[f"{name}_energies"]) < ENERGY
    assert gap(np.stack(outcome.of("mean")), expected[f"{name}_mean"]) < PLAN
    assert gap(np.stack(outcome.of("std")), expected[f"{name}_std"]) < PLAN
    assert gap(only(outcome, "actions"), expected[f"{name}_actions"]) < PLAN


def plain_plan(ac: Golden, **more: Any) -> dict[str, Any]:
    sizes = {"samples": 12, "topk": 3, "cem_steps": 3, "horizon": 2}
    return {"task": "plan", "states": ac.given["roll_state0"][0].tolist(), **sizes, **more}


def test_a_plan_follows_from_its_seed_and_keeps_its_bounds(ac: Golden, ac_bench: Ways) -> None:
    def planned(**more: Any) -> Any:
        return ended(ac_bench, start(ac), **plain_plan(ac, goal=goal(ac), **{"return": ["energies"]}, **more))

    first, again, other = planned(seed=5), planned(seed=5), planned(seed=6)
    assert gap(only(first, "actions"), only(again, "actions")) == 0
    assert gap(only(first, "actions"), only(other, "actions")) > 0
    held = planned(maxnorm=0.02, axis={"z": 0.01}, close_gripper=1)
    candidates = np.stack(held.of("candidates"))
    assert np.abs(candidates[..., :3]).max() <= 0.02 + 1e-7
    assert np.abs(candidates[:, :, 0, 6]).max() <= 0.75 and (candidates[:, :, 1:, 6] == 1).all()
    assert (candidates[..., 2] == np.float32(0.01)).all() and not candidates[..., 3:6].any()


def test_a_goal_may_be_a_picture_or_its_latents(ac: Golden, ac_bench: Ways) -> None:
    frame = npy(ac.given["clip"][0].transpose(0, 1)[-1:].contiguous())
    shown = ended(ac_bench, start(ac), frame, **plain_plan(ac))
    told = ended(ac_bench, start(ac), **plain_plan(ac, goal=goal(ac)))
    assert gap(only(shown, "actions"), only(told, "actions")) < PLAN


def test_a_plan_goes_on_from_earlier_frames(ac: Golden, ac_bench: Ways) -> None:
    """Its best candidate has the energy of a rollout from the same frames."""
    inputs = ac.given
    frames = inputs["ctx_states"].shape[1]
    past = {"context_frames": frames, "states": inputs["ctx_states"][0].tolist()}
    before = inputs["ctx_actions"][0, : frames - 1].tolist()
    plan = plain_plan(ac, goal=goal(ac), actions=before, **past)
    outcome = ended(ac_bench, start(ac, frames), **{**plan, "return": ["energies"]})
    last, energies = outcome.of("candidates")[-1], outcome.of("energies")[-1][:, 0]
    moves = [[*before, *each] for each in last.tolist()]
    again = ended(ac_bench, start(ac, frames), task="rollout", actions=moves, goal=goal(ac), **past)
    assert gap(again.of("energies")[-1][:, 0], energies) < ENERGY


def test_any_mixture_of_requests_equals_each_alone(ac: Golden, ac_bench: Ways) -> None:
    inputs = ac.given
    seen, known, past = inputs["clip"].shape[2], inputs["tf_actions"].shape[1], inputs["ctx_states"].shape[1]
    few = {**rolled(ac), "actions": inputs["roll_actions"][:2, :3].tolist()}
    taught = {"actions": inputs["tf_actions"][0].tolist(), "states": inputs["tf_states"][0].tolist()}
    context = {"actions": inputs["ctx_actions"].tolist(), "states": inputs["ctx_states"][0].tolist()}
    requests = [
        (seen, {}),
        (1, rolled(ac)),
        (1, rolled(ac, goal=goal(ac))),
        (1, few),
        (known, {"task": "predict", **taught}),
        (past, {"task": "rollout", "context_frames": past, **context}),
        (1, plain_plan(ac, goal=goal(ac), seed=3)),
        (1, rolled(ac, goal=goal(ac), cost="cosine")),
        (1, rolled(ac, normalize_reps=False)),
    ]
    asks = [SampleRequest(media=[start(ac, frames)], params=params, outputs=("tensor",)) for frames, params in requests]
    for ask, outcome in zip(asks, ac_bench.ask(*asks), strict=True):
        assert outcome.status == "finished", outcome.cause
        alone = ended(ac_bench, *ask.media, outputs=tuple(ask.outputs), **ask.params)
        actual = [(item.port, item.meta.get("step")) for item in outcome.items]
        assert sorted(actual, key=str) == sorted(((i.port, i.meta.get("step")) for i in alone.items), key=str)
        for port in {item.port for item in alone.items}:
            # A few ulps: other sequences in a pass change the order of sums.
            np.testing.assert_allclose(np.stack(outcome.of(port)), np.stack(alone.of(port)), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("way", ["http", "bench", "bench with steps ahead"])
def test_requests_whose_candidates_do_not_fit_together_are_all_answered(
    way: str, ac: Golden, ac_folder: Path, request: pytest.FixtureRequest
) -> None:
    """At most 512 candidates have caches: while 400 of one request are scored, the other requests wait."""
    if way == "http":
        asked: Ways = request.getfixturevalue("ac_server")
    else:
        spec = SPECS["vjepa2_ac"].bound(ac_folder, {})
        asked = LocalRuntime(spec, ac_folder, RuntimeSettings(pages=1024, lookahead=int(way != "bench")))
    moves = ac.given["roll_actions"][:, :2]
    many = moves.repeat(-(-400 // len(moves)), 1, 1)[:400].tolist()
    asks = [
        SampleRequest(media=[start(ac)], params=params, outputs=BOTH)
        for params in (
            *[rolled(ac, actions=many, goal=goal(ac)) for _ in range(4)],
            rolled(ac, goal=goal(ac)),
            plain_plan(ac, goal=goal(ac), samples=600, cem_steps=2),
            rolled(ac, actions=many, goal=goal(ac)),
        )
    ]
    for ask, outcome in zip(asks, asked.ask(*asks), strict=True):
        assert outcome.status == "finished", outcome.cause
        if ask.params.get("actions") is many:
            energies = by_candidate(outcome.of("energies"))[..., 0]
            expected = np.resize(ac.expected["roll_energies_per_step"][:, :2], energies.shape)
            assert gap(energies, expected) < ENERGY
    assert asked.leaks() == []


def test_what_candidates_share_is_computed_once(ac: Golden, ac_folder: Path) -> None:
    bench, given = served("vjepa2_ac", ac_folder), ac.given
    past, frame_tokens = given["ctx_states"].shape[1], ac.sizes.conditions + ac.encoder.frame_tokens
    frames, rows = [], []

    def look(module: Any, inputs: Any) -> None:
        if isinstance(module, Encoder):
            frames.append(len(inputs[0]))
        elif isinstance(module, Rotary3D) and inputs and inputs[0].dim() == 1 and len(inputs) == 3:
            rows.append(len(inputs[0]) // frame_tokens)

    watch = register_module_forward_pre_hook(look)
    outcome = ended(
        bench,
        start(ac, past),
        task="rollout",
        context_frames=past,
        actions=given["ctx_actions"].tolist(),
        states=given["ctx_states"][0].tolist(),
    )
    watch.remove()
    candidates, steps = len(given["ctx_actions"]), len(outcome.of("next_frame"))
    assert sum(frames) == past, "every frame once, for all candidates"
    assert sum(rows) == (past - 1) + candidates * steps, "the context once, for all candidates"
    assert max(rows) == candidates, "side by side"
    assert bench.leaks() == []


def test_candidates_and_plans_on_two_ranks(ac: Golden, ac_folder: Path) -> None:
    bench = served("vjepa2_ac", ac_folder, ranks=2)
    outcome = ended(bench, start(ac), **rolled(ac, goal=goal(ac)))
    assert gap(frames_of(outcome), ac.expected["roll_latents"]) < ROLLED
    assert gap(by_candidate(outcome.of("energies"))[..., 0], ac.expected["roll_energies_per_step"]) < ENERGY
    plan = ended(bench, start(ac), **search(ac, "cem2"))
    assert gap(only(plan, "actions"), ac.expected["cem2_actions"]) < PLAN
    assert bench.leaks() == []


def test_a_deployment_that_takes_longer_rollouts_runs_them(ac: Golden, ac_folder: Path) -> None:
    frames = ac.sizes.most_frames + 29
    spec = SPECS["vjepa2_ac"].bound(ac_folder, {"max_latent_frames": frames})
    bench = LocalRuntime(spec, ac_folder, RuntimeSettings(max_seq_len=spec.max_seq_len))
    known = ac.given["roll_actions"].shape[1]
    actions = ac.given["roll_actions"][:2].tile(1, -(-frames // known), 1)[:, :frames].tolist()
    outcome = ended(bench, start(ac), **rolled(ac, actions=actions))
    actual = frames_of(outcome)
    assert actual.shape[1] == frames and np.isfinite(actual).all()
    assert gap(actual[:, :known], ac.expected["roll_latents"][:2]) < ROLLED
    assert bench.leaks() == []


@pytest.mark.parametrize("cost", ["l1", "l2", "cosine"])
def test_energies_are_what_their_names_say(cost: str, ac: Golden, ac_bench: Ways) -> None:
    outcome = ended(ac_bench, start(ac), **rolled(ac, goal=goal(ac), cost=cost))
    frames, aim = frames_of(outcome)[:, -1].astype(np.float64), ac.given["goal_latents"][0].double().numpy()
    match cost:
        case "l1":
            expected = np.abs(frames - aim).mean(axis=(1, 2))
        case "l2":
            expected = np.square(frames - aim).mean(axis=(1, 2))
        case _:
            flat = frames.reshape(len(frames), -1)
            expected = 1 - flat @ aim.ravel() / np.linalg.norm(flat, axis=1) / np.linalg.norm(aim)
    assert gap(outcome.of("energies")[-1][:, 0], expected) < ENERGY
