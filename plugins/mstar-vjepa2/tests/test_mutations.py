"""Each typical mistake must make a golden test fail by far."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mstar_vjepa2.nodes import ac_predictor, blocks, encoder, poses, predictor, rotary

from .conftest import Golden, RowsView, gap
from .test_ac_predictor import ENERGY, NEAR, ROLLED, STATE, energies, latents, roll, taught

FAR = 10.0
"""Minimum effect of a mistake, in tolerances."""


def encoder_gap(base: Golden, nodes: dict[str, Any]) -> float:
    made = nodes["video_encoder"](pixel_values_videos=base.given["pixel_values_videos"])["encoder_hidden"]
    return gap(made, base.expected["last_hidden_state"])


def rollout_gap(ac: Golden, nodes: dict[str, Any], view: Any = None) -> float:
    given = ac.given
    start = latents(nodes, ac)[:1]
    made, _ = roll(nodes["ac_predictor"], start, given["roll_state0"][0, 0], given["roll_actions"], view)
    return gap(made, ac.expected["roll_latents"])


def pairwise_angles(self: Any, time: Tensor, row: Tensor, column: Tensor) -> rotary.Rotation:
    angles = torch.stack([time, row, column], dim=-1).float()[..., None] * self.frequencies
    both = angles.repeat_interleave(2, dim=-1).flatten(-2)[..., None, :]
    return both.cos(), both.sin()


def half_split(x: Tensor, rotation: rotary.Rotation) -> Tensor:
    width = rotation[0].shape[-1]
    parts = x[..., :width].unflatten(-1, (3, 2, -1))
    swapped = torch.stack([-parts[..., 1, :], parts[..., 0, :]], dim=-2).flatten(-3)
    return torch.cat([x[..., :width] * rotation[0] + swapped * rotation[1], x[..., width:]], dim=-1)


def whole_head(x: Tensor, rotation: rotary.Rotation) -> Tensor:
    """Rotate the remaining lanes like the first ones."""
    extra = x.shape[-1] - rotation[0].shape[-1]
    return rotate(x, tuple(torch.cat([each, each[..., :extra]], dim=-1) for each in rotation))  # type: ignore[arg-type]


rotate = rotary.rotate


def test_angles_in_pairs_are_noticed(base: Golden, base_nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert encoder_gap(base, base_nodes) < NEAR
    monkeypatch.setattr(rotary.Rotary3D, "forward", pairwise_angles)
    assert encoder_gap(base, base_nodes) > FAR * NEAR


@pytest.mark.parametrize("wrong", [half_split, whole_head])
def test_another_rotation_is_noticed(
    wrong: Any, base: Golden, base_nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    head_dim = base.encoder.vit.width // base.encoder.vit.heads
    if wrong is whole_head and 3 * rotary.lanes_per_axis(head_dim) == head_dim:
        pytest.skip(
            f"runs when MSTAR_GOLDEN names a set whose heads keep lanes unrotated; these of {head_dim} lanes keep none"
        )
    monkeypatch.setattr(blocks, "rotate", wrong)
    assert encoder_gap(base, base_nodes) > FAR * NEAR


def test_an_approximate_gelu_is_noticed(
    base: Golden, base_nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "gelu", lambda x: functional.gelu(x, approximate="tanh"))
    assert encoder_gap(base, base_nodes) > FAR * NEAR


def test_the_first_mask_vector_is_noticed(
    base: Golden, base_nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictor, "MASK_INDEX", 0)
    masks = {name: base.given[name] for name in ("context_mask", "target_mask")}
    nodes = base_nodes["predictor"](encoder_hidden=base.expected["last_hidden_state"], **masks)
    assert gap(nodes["predicted_hidden"], base.expected["predicted_masked"]) > FAR * NEAR


def test_latents_that_are_not_normed_are_noticed(
    ac: Golden, ac_nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rollout_gap(ac, ac_nodes) < ROLLED
    monkeypatch.setattr(ac_predictor, "latents_of", lambda hidden, wanted: hidden.float())
    assert rollout_gap(ac, ac_nodes) > FAR * ROLLED


def test_the_small_epsilon_of_the_blocks_in_the_latents_is_noticed(
    ac: Golden, ac_nodes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The effect is small in float32."""
    monkeypatch.setattr(encoder, "LATENT_EPS", 1e-6)
    assert rollout_gap(ac, ac_nodes) > ROLLED


def test_a_turn_on_the_right_is_noticed(ac: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, actual = poses._matrix, []

    def swapped(angles: Tensor) -> Tensor:
        actual.append(angles)
        return matrix(angles)

    monkeypatch.setattr(poses, "_matrix", swapped)
    pose, action = ac.given["pose"].double(), ac.given["pose_action"].double()
    assert gap(poses.moved(pose, action), ac.expected["pose_next"]) < STATE
    right = matrix(pose[..., 3:6]) @ matrix(action[..., 3:6])
    assert gap(poses._angles(right), ac.expected["pose_next"][..., 3:6]) > FAR * STATE
    assert len(actual) == 1


def test_conditions_without_their_time_are_noticed(ac: Golden, ac_nodes: dict[str, Any]) -> None:
    node = ac_nodes["ac_predictor"]
    count = ac.given["tf_actions"].shape[1]
    forward = node.rotary.forward

    def timeless(time: Tensor, row: Tensor, column: Tensor) -> rotary.Rotation:
        is_condition = torch.arange(len(time)) % node.frame_tokens < node.conditions
        return forward(torch.where(is_condition, torch.zeros_like(time), time), row, column)

    node.rotary.forward = timeless
    try:
        actual = [taught(node, ac, count, RowsView(node.frame_tokens), slice(t, t + 1)) for t in range(1)]
        view = RowsView(node.frame_tokens)
        actual = [taught(node, ac, count, view, slice(t, t + 1)) for t in range(count)]
    finally:
        del node.rotary.forward
    assert gap(torch.cat(actual).flatten(0, 1), ac.expected["tf_output_normalized"][0]) > FAR * NEAR


class CausalView(RowsView):
    """View that masks later tokens of the same frame, as in a text decoder."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        q, k, v = (each.view(-1, self.frame_tokens, *each.shape[1:]) for each in (query, key, value))
        if layer in self.held:
            k, v = (torch.cat([a, b], dim=1) for a, b in zip(self.held[layer], (k, v), strict=True))
        self.held[layer] = (k, v)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        heads = (each.transpose(1, 2) for each in (q, k, v))
        return functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(0, 1)


def test_a_mask_over_tokens_is_noticed(ac: Golden, ac_nodes: dict[str, Any]) -> None:
    assert rollout_gap(ac, ac_nodes, CausalView(ac_nodes["ac_predictor"].frame_tokens)) > FAR * ROLLED


def test_a_time_that_starts_again_is_noticed(ac: Golden, ac_nodes: dict[str, Any]) -> None:
    node, inputs = ac_nodes["ac_predictor"], ac.given
    frame, state, view, actual = latents(ac_nodes, ac)[:1], inputs["roll_state0"][0, 0], RowsView(node.frame_tokens), []
    rows = len(inputs["roll_actions"])
    for step in range(inputs["roll_actions"].shape[1]):
        found = node(
            kv=view,
            positions=torch.zeros(rows * node.frame_tokens).long(),
            step=torch.tensor(step),
            normalize_reps=torch.tensor(True),
            frame=frame,
            state=state,
            actions=inputs["roll_actions"],
        )
        frame, state = found["next_frame"], found["next_state"]
        actual.append(frame[:, 0])
    assert gap(torch.stack(actual, 1), ac.expected["roll_latents"]) > FAR * ROLLED


def test_a_cache_shared_at_the_frame_where_candidates_part_is_noticed(ac: Golden, ac_nodes: dict[str, Any]) -> None:
    """Patches attend to the action of their frame, so its keys belong to one candidate."""
    node, inputs = ac_nodes["ac_predictor"], ac.given

    class Shared(RowsView):
        def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
            mixed = super().attend(layer, query, key, value, scale)
            self.held[layer] = tuple(each[:1].expand_as(each) for each in self.held[layer])  # type: ignore[assignment]
            return mixed

    assert rollout_gap(ac, ac_nodes, Shared(node.frame_tokens)) > FAR * ROLLED
    assert inputs["roll_actions"].shape[0] > 1


def test_encoders_of_action_and_state_in_each_others_place_are_noticed(ac: Golden, ac_nodes: dict[str, Any]) -> None:
    node, inputs = ac_nodes["ac_predictor"], ac.given
    node.action_encoder, node.state_encoder = node.state_encoder, node.action_encoder
    try:
        actual, _ = roll(node, latents(ac_nodes, ac)[:1], inputs["roll_state0"][0, 0], inputs["roll_actions"])
    finally:
        node.action_encoder, node.state_encoder = node.state_encoder, node.action_encoder
    found = energies(actual[:, -1], inputs["goal_latents"])
    assert gap(found, ac.expected["roll_energies"]) > FAR * ENERGY
