"""Encoder, masked predictor, pooler and head against the reference's vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mstar_core.errors import EngineError
from mstar_vjepa2.nodes.pooler import NoPooler
from mstar_vjepa2.nodes.predictor import gathered
from mstar_vjepa2.nodes.rotary import lanes_per_axis
from mstar_vjepa2.params import POOLINGS

from .conftest import Golden, build, gap

NEAR = 2e-5
"""Tolerance of latents in float32 on a CPU. Source: the golden folder's README."""


@pytest.fixture(scope="module")
def hidden(base: Golden, base_nodes: dict[str, Any]) -> torch.Tensor:
    with torch.inference_mode():
        return base_nodes["video_encoder"](pixel_values_videos=base.given["pixel_values_videos"])["encoder_hidden"]


@pytest.mark.parametrize(("head_dim", "lanes"), [(64, 20), (80, 26), (32, 10), (16, 4), (12, 4)])
def test_lanes_that_turn_with_each_axis(head_dim: int, lanes: int) -> None:
    assert lanes_per_axis(head_dim) == lanes


def test_every_block_of_the_encoder(base: Golden, base_nodes: dict[str, Any]) -> None:
    encoder, expected = base_nodes["video_encoder"].encoder, base.expected
    count = len(encoder.blocks)
    last, kept = encoder(base.given["pixel_values_videos"], range(count + 1))
    assert gap(kept[0], expected["patch_embeddings"]) < NEAR
    for number in range(count):
        assert gap(kept[number + 1], expected[f"encoder_block_{number}"]) < NEAR
    assert gap(last, expected["last_hidden_state"]) < NEAR


@pytest.mark.parametrize("case", ["long", "single_frame", "odd_frames"])
def test_clips_of_other_lengths(case: str, base: Golden, base_nodes: dict[str, Any]) -> None:
    expected = base.expected[f"last_hidden_state_{case}"]
    config = base_nodes["video_encoder"].encoder.config
    tubelets = expected.shape[1] // config.frame_tokens
    pixels = base.given["pixel_values_long" if case == "long" else "pixel_values_videos"]
    frames = {"long": pixels.shape[1], "single_frame": 1, "odd_frames": config.tubelet * tubelets + 1}[case]
    nodes = base_nodes["video_encoder"](pixel_values_videos=pixels[:, :frames])["encoder_hidden"]
    assert gap(nodes, expected) < NEAR


def test_a_row_does_not_depend_on_what_shares_its_batch(base: Golden, base_nodes: dict[str, Any]) -> None:
    pixels = base.given["pixel_values_videos"]
    together = base_nodes["video_encoder"](pixel_values_videos=pixels)["encoder_hidden"]
    alone = base_nodes["video_encoder"](pixel_values_videos=pixels[1:])["encoder_hidden"]
    assert gap(together[1:], alone) < 1e-5


def test_pixels_as_bytes_are_normalised_as_the_processor_does(base_nodes: dict[str, Any]) -> None:
    from mstar_vjepa2.request.transforms import normalised

    encoder = base_nodes["video_encoder"]
    crop = encoder.encoder.config.crop
    levels = torch.arange(2 * 3 * crop * crop) % 256
    pixels = levels.to(torch.uint8).view(1, 2, 3, crop, crop)
    inputs = torch.from_numpy(normalised(pixels.numpy()))
    assert gap(encoder.encoder.normalised(pixels), inputs) < 1e-6
    as_bytes, as_floats = (encoder(pixel_values_videos=each)["encoder_hidden"] for each in (pixels, inputs))
    assert gap(as_bytes, as_floats) < NEAR


@pytest.mark.parametrize("case", ["default", "masked", "future"])
def test_masked_prediction(case: str, base: Golden, base_nodes: dict[str, Any], hidden: torch.Tensor) -> None:
    inputs, suffix = base.given, "_future" if case == "future" else ""
    every = torch.arange(hidden.shape[1]).expand(len(hidden), -1)
    context, target = (every if case == "default" else inputs[f"{name}_mask{suffix}"] for name in ("context", "target"))
    nodes = base_nodes["predictor"](encoder_hidden=hidden, context_mask=context, target_mask=target)
    assert gap(nodes["predicted_hidden"], base.expected[f"predicted_{case}"]) < NEAR
    if case == "masked":
        assert gap(gathered(hidden, context), base.expected["masked_hidden_state"]) < NEAR
        assert gap(gathered(hidden, target), base.expected["target_hidden_state"]) < NEAR


def test_prediction_ahead_slides_its_window(base: Golden, base_nodes: dict[str, Any], hidden: torch.Tensor) -> None:
    masks = {name: base.given[f"{name}_future"] for name in ("context_mask", "target_mask")}
    for step in base.expected["anticipation_steps"].unbind(1):
        nodes = base_nodes["predictor"](encoder_hidden=hidden, **masks)
        assert gap(nodes["predicted_hidden"], step) < NEAR
        hidden = nodes["window"]


def test_the_order_of_ids_does_not_matter(base: Golden, base_nodes: dict[str, Any], hidden: torch.Tensor) -> None:
    context, target = base.given["context_mask"], base.given["target_mask"]
    turned = base_nodes["predictor"](encoder_hidden=hidden, context_mask=context.flip(1), target_mask=target.flip(1))
    assert gap(turned["predicted_hidden"].flip(1), base.expected["predicted_masked"]) < NEAR


def test_pooled_vectors_and_logits(base: Golden, base_nodes: dict[str, Any], hidden: torch.Tensor) -> None:
    nodes = base_nodes["pooler"](encoder_hidden=hidden)
    assert gap(nodes["pooled"], base.expected["pooled"]) < NEAR
    assert gap(nodes["logits"], base.expected["logits"]) < NEAR


def test_a_checkpoint_without_a_pooler_says_so(hidden: torch.Tensor) -> None:
    with pytest.raises(EngineError, match="no pooler"):
        NoPooler()(encoder_hidden=hidden)


def test_rows_of_one_batch_may_want_different_things(base: Golden, base_nodes: dict[str, Any]) -> None:
    """The batch key does not contain the pooling."""
    pixels, encoder = base.given["pixel_values_videos"], base_nodes["video_encoder"]
    three = torch.cat([pixels[:2], pixels[:1]])
    how = torch.tensor([POOLINGS.index(name) for name in ("none", "mean", "mean_space")])
    actual = encoder(pixel_values_videos=three, pooling=how)
    whole, size = base.expected["last_hidden_state"], encoder.encoder.config.frame_tokens
    assert [each is None for each in actual["encoder_hidden"]] == [False, True, True]
    assert [each is None for each in actual["pooled"]] == [True, False, False]
    assert gap(actual["encoder_hidden"][0], whole[0]) < NEAR
    assert gap(actual["pooled"][1], whole[1].mean(0)) < NEAR
    assert gap(actual["pooled"][2], whole[0].unflatten(0, (-1, size)).mean(1)) < NEAR


def test_chosen_layers_come_in_the_order_asked_for(base: Golden, base_nodes: dict[str, Any]) -> None:
    rows = torch.tensor([[2, 0], [0, 1]])
    none = torch.zeros(2, dtype=torch.int64)
    pixels = base.given["pixel_values_videos"][:2]
    nodes = base_nodes["video_encoder"](pixel_values_videos=pixels, layers=rows, pooling=none)
    known = [base.expected["patch_embeddings"], base.expected["encoder_block_0"], base.expected["encoder_block_1"]]
    assert "encoder_hidden" not in nodes
    for row, numbers in enumerate(rows.tolist()):
        for place, number in enumerate(numbers):
            assert gap(nodes["layer_hidden"][row, place], known[number][row]) < NEAR


def test_half_precision_stays_near(base: Golden, base_folder: Any) -> None:
    nodes = build("vjepa2", base_folder, torch.bfloat16)
    pixels, expected = base.given["pixel_values_videos"], base.expected["last_hidden_state"]
    actual = nodes["video_encoder"](pixel_values_videos=pixels, pooling=torch.zeros(len(pixels)).long())
    found = torch.stack(actual["encoder_hidden"])
    assert found.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < 2e-2
