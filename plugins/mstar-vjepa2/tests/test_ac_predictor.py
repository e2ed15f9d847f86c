"""AC encoder, predictor, rollouts, energies and poses against the reference; cached steps against one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.module import NodeModule
from mstar_core.errors import EngineError
from mstar_core.layers.kv_view import AppendOnlyView
from mstar_vjepa2.nodes import blocks
from mstar_vjepa2.nodes.planning import distance
from mstar_vjepa2.nodes.poses import difference, moved

from .conftest import AC_SET, BlockView, Golden, RowsView, build, gap, lay_out

NEAR, ROLLED, ENERGY, STATE = 2e-5, 3e-5, 2e-6, 1e-5
"""Tolerances in float32 on a CPU. Source: the golden folder's README."""

YES = torch.tensor(True)


def latents(nodes: dict[str, Any], golden: Golden, *, normed: bool = True) -> Tensor:
    """Encode the clip's frames, [t, S, width]."""
    clip = golden.given["clip"].transpose(1, 2)
    made = nodes["video_encoder"](pixel_values_videos=clip, normalize_reps=torch.tensor([normed]))
    return made["encoder_hidden"][0]


def roll(
    predictor: Any, frame: Tensor, state: Tensor, actions: Tensor, view: Any = None, start: int = 0, **more: Any
) -> tuple[Tensor, Tensor]:
    """Roll out all candidates step by step with a cache: latents [K, H, S, width] and states [K, H, 7]."""
    rows, size = len(actions), predictor.frame_tokens
    view = view or RowsView(size)
    frames, states = [], []
    for step in range(actions.shape[1]):
        made = predictor(
            kv=view,
            positions=torch.full((rows * size,), start + step),
            step=torch.tensor(step),
            normalize_reps=YES,
            frame=frame,
            state=state,
            actions=actions,
            **more,
        )
        frame, state = made["next_frame"], made["next_state"]
        frames.append(frame[:, 0])
        states.append(state)
    return torch.stack(frames, 1), torch.stack(states, 1)


def taught(predictor: Any, golden: Golden, count: int, view: Any, frames: slice | None = None, **more: Any) -> Tensor:
    """Predict from known frames in one pass, [t, S, width]."""
    given = golden.given
    at = torch.arange(count)[frames or slice(None)].repeat_interleave(predictor.frame_tokens)
    known = given["tf_latents"].view(count, predictor.patches, -1)
    made = predictor(
        kv=view,
        positions=at,
        step=at,
        given_frames=known,
        given_actions=given["tf_actions"][0],
        given_states=given["tf_states"][0],
        **{"normalize_reps": YES, **more},
    )
    found: Tensor = made["next_frame"]
    return found.view(-1, *found.shape[-2:])


def energies(frames: Tensor, goal: Tensor) -> Tensor:
    return distance(frames, goal[0], "l1")


@pytest.mark.parametrize("normed", [False, True], ids=["raw", "normalized"])
def test_frames_are_encoded_alone(normed: bool, ac: Golden, ac_nodes: dict[str, Any]) -> None:
    expected = ac.expected[f"encoder_hidden_{'normalized' if normed else 'raw'}"]
    assert gap(latents(ac_nodes, ac, normed=normed).flatten(0, 1), expected[0]) < NEAR


def test_a_goal_is_encoded_in_the_same_pass(ac: Golden, ac_nodes: dict[str, Any]) -> None:
    clip, encoder = ac.given["clip"].transpose(1, 2), ac_nodes["video_encoder"]
    actual = encoder(pixel_values_videos=clip[:, :1], goal_frame=clip[:, -1:], normalize_reps=torch.tensor([True]))
    assert actual["encoder_hidden"].shape[1] == 1
    assert gap(actual["goal"], ac.given["goal_latents"]) < NEAR
    inputs = encoder(
        pixel_values_videos=clip[:, :1], goal_latents=actual["goal"] * 2, normalize_reps=torch.tensor([True])
    )
    assert torch.equal(inputs["goal"], actual["goal"] * 2), "latents are taken as they are"


def test_every_block_in_one_pass(ac: Golden, ac_nodes: dict[str, Any]) -> None:
    predictor, actual = ac_nodes["ac_predictor"], []
    hooks = [
        block.register_forward_hook(lambda _m, _i, out: actual.append(out[1].added(out[0])))
        for block in predictor.blocks
    ]
    count = ac.given["tf_actions"].shape[1]
    view = BlockView(predictor.frame_tokens)
    normed = taught(predictor, ac, count, view)
    for hook in hooks:
        hook.remove()
    for number, block in enumerate(actual):
        assert gap(block, ac.expected[f"tf_block_{number}"][0]) < NEAR
    assert gap(normed.flatten(0, 1), ac.expected["tf_output_normalized"][0]) < NEAR
    raw = taught(predictor, ac, count, view, normalize_reps=torch.tensor(False))
    assert gap(raw.flatten(0, 1), ac.expected["tf_output"][0]) < NEAR


def test_cached_steps_equal_one_pass_over_all_frames(ac: Golden, ac_nodes: dict[str, Any]) -> None:
    predictor = ac_nodes["ac_predictor"]
    count = ac.given["tf_actions"].shape[1]
    whole = taught(predictor, ac, count, BlockView(predictor.frame_tokens))
    view = RowsView(predictor.frame_tokens)
    steps = [taught(predictor, ac, count, view, slice(t, t + 1)) for t in range(count)]
    assert gap(torch.cat(steps), whole) < NEAR


class Placing(RowsView):
    """A RowsView into which the module writes keys and values. attended: layers with attention."""

    def __init__(self, frame_tokens: int) -> None:
        super().__init__(frame_tokens)
        self.attended: list[int] = []
        self.placed: list[int] = []

    def places(self, layer: int) -> tuple[Tensor, Tensor]:
        self.placed.append(layer)
        return torch.zeros(()), torch.zeros(())

    def attend_placed(self, layer: int, query: Tensor, scale: float | None = None, kernel: object = None) -> Tensor:
        self.attended.append(layer)
        return query


@pytest.mark.parametrize("kind", ["plain", "placed"])
def test_frames_of_which_nothing_is_wanted_are_appended_alone(
    kind: str, ac: Golden, ac_nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is complete, and the last block computes nothing after its keys and values."""
    predictor = ac_nodes["ac_predictor"]
    size, last = predictor.frame_tokens, len(predictor.blocks) - 1
    frame, pose = torch.randn(1, predictor.patches, predictor.predictor_embed.in_features), torch.randn(2, 7)
    inputs = {
        "positions": torch.zeros(size, dtype=torch.int64),
        "normalize_reps": YES,
        "step": torch.tensor(0),
        "given_frames": frame,
        "given_states": pose[:1],
        "given_actions": pose[1:],
    }
    whole, view = RowsView(size), Placing(size) if kind == "placed" else RowsView(size)
    predictor(kv=whole, **inputs)
    monkeypatch.setattr(predictor.blocks[last].mlp, "forward", lambda x: pytest.fail("an unused block"))
    if isinstance(view, Placing):
        monkeypatch.setattr(
            blocks, "qkv_rotary", lambda x, layer, rotation, heads, target: x.unflatten(-1, (heads, -1))
        )
    assert predictor(kv=AppendOnlyView(view), **inputs) == {}
    if isinstance(view, Placing):
        assert (view.placed, view.attended) == (list(range(last + 1)), list(range(last)))
        return
    for layer in range(last + 1):
        assert all(gap(mine, expected) == 0 for mine, expected in zip(view.held[layer], whole.held[layer], strict=True))


def test_extrinsics_are_a_third_condition(ac: Golden, tmp_path: Any) -> None:
    config = ac.json("config.json")
    config["ac_predictor"]["use_extrinsics"] = True
    predictor = build("vjepa2_ac", lay_out(tmp_path / "x", config, ac.tensors("model")))["ac_predictor"]
    cameras, count = ac.given["tf_extrinsics"][0], ac.given["tf_actions"].shape[1]
    actual = taught(
        predictor,
        ac,
        count,
        BlockView(predictor.frame_tokens),
        given_extrinsics=cameras,
        normalize_reps=torch.tensor(False),
    )
    assert gap(actual.flatten(0, 1), ac.expected["tf_output_extrinsics"][0]) < NEAR


def test_candidates_as_rows_with_integrated_states(ac: Golden, ac_nodes: dict[str, Any]) -> None:
    inputs, expected = ac.given, ac.expected
    frames, states = roll(
        ac_nodes["ac_predictor"], latents(ac_nodes, ac)[:1], inputs["roll_state0"][0, 0], inputs["roll_actions"]
    )
    assert gap(frames, expected["roll_latents"]) < ROLLED
    assert gap(states, expected["roll_states"][:, 1:]) < STATE
    actual = torch.stack([energies(each, inputs["goal_latents"]) for each in frames.unbind(1)], 1)
    assert gap(actual, expected["roll_energies_per_step"]) < ENERGY
    assert gap(actual[:, -1], expected["roll_energies"]) < ENERGY


def test_given_states_take_the_place_of_integrated_ones(ac: Golden, ac_nodes: dict[str, Any]) -> None:
    inputs, expected = ac.given, ac.expected
    states = inputs["roll_given_states"]
    frames, _ = roll(
        ac_nodes["ac_predictor"], latents(ac_nodes, ac)[:1], states[:, 0], inputs["roll_actions"], states=states
    )
    assert gap(frames, expected["roll_given_latents"]) < ROLLED
    actual = torch.stack([energies(each, inputs["goal_latents"]) for each in frames.unbind(1)], 1)
    assert gap(actual, expected["roll_given_energies_per_step"]) < ENERGY


def test_candidates_share_the_cache_of_their_context(ac: Golden, ac_nodes: dict[str, Any]) -> None:
    inputs, expected, predictor = ac.given, ac.expected, ac_nodes["ac_predictor"]
    past = ac.json("cases.json")["T0"] - 1
    first = latents(ac_nodes, ac)
    view = RowsView(predictor.frame_tokens)
    for t in range(past):
        predictor(
            kv=view,
            positions=torch.full((predictor.frame_tokens,), t),
            step=torch.tensor(t),
            normalize_reps=YES,
            given_frames=first[:past],
            given_actions=inputs["ctx_actions"][0, :past],
            given_states=inputs["ctx_states"][0, :past],
        )
    state, actions = inputs["ctx_states"][0, past], inputs["ctx_actions"][:, past:]
    frames, states = roll(predictor, first[past : past + 1], state, actions, view, start=past)
    assert gap(frames, expected["ctx_latents"]) < ROLLED
    assert gap(states, expected["ctx_states"][:, past + 1 :]) < STATE
    actual = torch.stack([energies(each, inputs["goal_latents"]) for each in frames.unbind(1)], 1)
    assert gap(actual, expected["ctx_energies_per_step"]) < ENERGY


@pytest.mark.parametrize("repeat", AC_SET.numbers("grid_energies_repeat"))
def test_an_energy_landscape(repeat: int, ac: Golden, ac_nodes: dict[str, Any]) -> None:
    inputs = ac.given
    actions = inputs["grid_actions"].expand(-1, repeat, -1)
    frames, _ = roll(ac_nodes["ac_predictor"], latents(ac_nodes, ac)[:1], inputs["roll_state0"][0, 0], actions)
    actual = energies(frames[:, -1], inputs["goal_latents"])
    assert gap(actual, ac.expected[f"grid_energies_repeat{repeat}"]) < ENERGY


def test_a_candidate_does_not_depend_on_its_number_of_neighbours(ac: Golden, ac_nodes: dict[str, Any]) -> None:
    inputs = ac.given
    start, state = latents(ac_nodes, ac)[:1], inputs["roll_state0"][0, 0]
    many, _ = roll(ac_nodes["ac_predictor"], start, state, inputs["roll_actions"])
    for number in range(len(many)):
        one, _ = roll(ac_nodes["ac_predictor"], start, state, inputs["roll_actions"][number : number + 1])
        assert gap(many[number : number + 1], one) < 1e-5


def test_lists_of_steps_may_differ_in_length_between_rows(ac: Golden, ac_nodes: dict[str, Any]) -> None:
    inputs, predictor = ac.given, ac_nodes["ac_predictor"]
    size, rows = predictor.frame_tokens, len(inputs["roll_actions"])
    horizon = inputs["roll_actions"].shape[1]
    actions = [each[: 1 + row % horizon] for row, each in enumerate(inputs["roll_actions"])]
    steps = torch.tensor([row % 2 if len(each) > 1 else 0 for row, each in enumerate(actions)])
    at = steps.repeat_interleave(size)
    frame, state = latents(ac_nodes, ac)[:1].expand(rows, -1, -1, -1), inputs["roll_state0"][0].expand(rows, -1)
    actual = [
        predictor(
            kv=RowsView(size),
            positions=0 * at,
            step=at,
            normalize_reps=YES.expand(rows * size),
            frame=frame,
            state=state,
            actions=moves,
        )
        for moves in (actions, inputs["roll_actions"])
    ]
    assert gap(actual[0]["next_frame"], actual[1]["next_frame"]) == 0
    first = steps == 0
    assert gap(actual[0]["next_frame"][first, 0], ac.expected["roll_latents"][first, 0]) < ROLLED
    assert actual[0]["next_state"].shape == (rows, 7)


def test_values_of_another_number_of_rows_are_an_error(ac: Golden, ac_nodes: dict[str, Any]) -> None:
    inputs, predictor = ac.given, ac_nodes["ac_predictor"]
    size = predictor.frame_tokens
    with pytest.raises(EngineError, match=f"{len(inputs['roll_actions'])} sequences in a step of 1"):
        predictor(
            kv=RowsView(size),
            positions=torch.zeros(size).long(),
            step=torch.tensor(0),
            normalize_reps=YES,
            frame=latents(ac_nodes, ac)[:1],
            state=inputs["roll_state0"][0, 0],
            actions=inputs["roll_actions"],
        )


def test_poses_are_turned_by_matrices(ac: Golden) -> None:
    inputs, expected = ac.given, ac.expected
    assert gap(moved(inputs["pose"], inputs["pose_action"]), expected["pose_next"]) < STATE
    assert gap(difference(inputs["pose"][:, 0], inputs["pose_end"][:, 0]), expected["pose_diff"]) < STATE


def test_an_action_without_a_turn_leaves_the_angles() -> None:
    pose = torch.tensor([0.1, 0.2, 0.3, 3.0, -0.7, 2.5, 0.9])
    action = torch.tensor([0.05, 0.0, -0.05, 0.0, 0.0, 0.0, 0.4])
    after = moved(pose, action)
    assert gap(after[3:6], pose[3:6]) < STATE
    assert float(after[6]) == 1.0, "the gripper ends at closed"
    assert float(moved(pose, -2 * action)[6]) == pytest.approx(0.1, abs=1e-6)


def test_at_the_pole_the_rotation_is_right_though_its_angles_are_a_choice() -> None:
    pose = torch.tensor([0.0, 0.0, 0.0, 0.4, torch.pi / 2, -0.3, 0.0], dtype=torch.float64)
    after = moved(pose, torch.zeros(7))
    assert gap(difference(pose, after)[3:6], torch.zeros(3)) < 1e-6


def test_half_precision_stays_near(ac: Golden, ac_folder: Any) -> None:
    nodes = build("vjepa2_ac", ac_folder, torch.bfloat16)
    inputs = ac.given
    frames, states = roll(
        nodes["ac_predictor"], latents(nodes, ac)[:1], inputs["roll_state0"][0, 0], inputs["roll_actions"]
    )
    expected = ac.expected["roll_latents"]
    assert frames.dtype == states.dtype == torch.float32
    assert float((frames - expected).norm() / expected.norm()) < 5e-2
    assert gap(states, ac.expected["roll_states"][:, 1:]) < STATE
    actual = torch.stack([energies(each, inputs["goal_latents"]) for each in frames.unbind(1)], 1)
    assert gap(actual, ac.expected["roll_energies_per_step"]) < 1e-2


def test_the_largest_step_is_reserved_with_a_plans_frames(ac_nodes: dict[str, Any]) -> None:
    """Four thousand candidates' last frames in float32, and memory of a pass in proportion to its tokens."""
    predictor = ac_nodes["ac_predictor"]
    frame = predictor.patches * predictor.predictor_embed.in_features * 4
    assert isinstance(predictor, NodeModule)
    assert predictor.working_bytes(0) == 4096 * frame
    assert predictor.working_bytes(2000) - predictor.working_bytes(1000) == predictor.working_bytes(1000) - 4096 * frame
    assert predictor.working_bytes(1000) > 4096 * frame + 1000 * predictor.proj.out_features * 8
