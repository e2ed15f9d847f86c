"""The modules against the reference: image encoder, autoencoder, language model, both experts, flow."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from mstar_bagel.nodes.autoencoder import from_tokens, to_tokens
from mstar_bagel.nodes.flow import time_features
from mstar_bagel.nodes.vision import patches

from .conftest import GOLDEN

FEATURES = 5e-5
LOGITS = 2e-4
LATENTS = 2e-4
VELOCITY = 5e-4


def close(found: torch.Tensor, wanted: torch.Tensor, limit: float) -> None:
    torch.testing.assert_close(found, wanted, atol=limit, rtol=0)


# -- image encoder ----------------------------------------------------------------------------------------------------


def test_patches_are_channel_last_in_row_order(golden: Any, reference: Any) -> None:
    inputs = golden.tensors("preprocess")
    for name in [key.removesuffix(".vit_patches") for key in inputs if key.endswith(".vit_patches")]:
        close(patches(inputs[f"{name}.vit_input"], reference.sizes.vision.patch), inputs[f"{name}.vit_patches"], 1e-6)


def test_image_features_equal_the_reference(image: str, golden: Any, reference: Any) -> None:
    expected, pixels = golden.tensors("vit"), golden.tensors("preprocess")[f"{image}.vit_input"]
    lengths = [len(expected[f"{image}.encoder_out"])]
    close(reference.vit.vit_model.vision_model([pixels], lengths), expected[f"{image}.encoder_out"], FEATURES)
    close(reference.vit(image=pixels[None])["features"][0], expected[f"{image}.llm_embeds"], FEATURES)


def test_packed_images_give_the_features_of_each_alone(golden: Any, reference: Any) -> None:
    expected, inputs = golden.tensors("vit"), golden.tensors("preprocess")
    packed = reference.vit(image=[inputs[f"{name}.vit_input"] for name in golden.images])["features"]
    for name, actual in zip(golden.images, packed, strict=True):
        close(actual, expected[f"{name}.llm_embeds"], FEATURES)
    close(torch.cat(packed), expected[f"packed_{''.join(golden.images)}.llm_embeds"], FEATURES)


# -- autoencoder ------------------------------------------------------------------------------------------------------


def test_clean_latents_equal_the_reference(image: str, golden: Any, reference: Any) -> None:
    expected, pixels = golden.tensors("vae"), golden.tensors("preprocess")[f"{image}.vae_input"]
    close(reference.encoder.encoder(pixels[None]), expected[f"{image}.moments"], FEATURES)
    tokens = reference.encoder.encode(pixels)
    close(tokens.flatten(0, 1), expected[f"{image}.latent_tokens"], FEATURES)
    close(from_tokens(tokens, reference.sizes.latent_patch), expected[f"{image}.latent_mean"][0], FEATURES)
    close(reference.encoder(image=[pixels])["features"][0], expected[f"{image}.llm_embeds_t0"], FEATURES)


def test_decoded_latents_equal_the_reference(image: str, golden: Any, reference: Any, decoded: None) -> None:
    expected = golden.tensors("vae")
    tokens = to_tokens(expected[f"{image}.latent_mean"][0], reference.sizes.latent_patch)
    close(reference.decoder.decode(tokens), expected[f"{image}.decode_of_latent_mean"][0], FEATURES)


def test_the_autoencoder_in_bfloat16_is_near_float32(image: str, golden: Any, reference: Any) -> None:
    """8-bit rounding is part of the difference, and a decoder of random weights is the harder case."""
    decoder, encoder = copy.deepcopy(reference.decoder), copy.deepcopy(reference.encoder)
    decoder.use_half_precision(torch.bfloat16)
    encoder.use_half_precision(torch.bfloat16)
    tokens = to_tokens(golden.tensors("vae")[f"{image}.latent_mean"][0], reference.sizes.latent_patch)
    actual, expected = (each.pixels(each.decode(tokens)).double() for each in (decoder, reference.decoder))
    assert 10 * torch.log10(255**2 / (actual - expected).square().mean()) > 42
    pixels = golden.tensors("preprocess")[f"{image}.vae_input"]
    half, whole = (each(image=[pixels])["features"][0] for each in (encoder, reference.encoder))
    assert half.dtype == torch.float32
    assert float((half - whole).norm() / whole.norm()) < 0.02


def test_a_posterior_sample_is_scaled_as_in_the_reference(image: str, golden: Any, reference: Any) -> None:
    """The server uses the mean; the stored sample proves how moments and scale are read."""
    expected, vae = golden.tensors("vae"), reference.sizes.vae
    mean, logvar = expected[f"{image}.moments"].chunk(2, dim=1)
    sample = vae.scale * (mean + (logvar / 2).exp() * expected[f"{image}.eps"] - vae.shift)
    close(sample, expected[f"{image}.latent_sampled"], FEATURES)


def test_the_memory_of_the_largest_steps_is_known(reference: Any) -> None:
    sizes = reference.sizes
    side = sizes.latent_grid * sizes.token_pixels
    assert reference.encoder.working_bytes(0) == 4 * side**2 * sizes.vae.width * 4
    assert reference.decoder.working_bytes(0) >= reference.encoder.working_bytes(0)
    assert reference.llm.working_bytes(1 << 20) > reference.llm.working_bytes(1) > 3 * 8194 * sizes.language.mlp * 4


def test_pixels_are_truncated(reference: Any) -> None:
    values = torch.tensor([-1.5, -1.0, 0.0, 0.999, 1.0, 2.0])
    actual = reference.decoder.pixels(values.expand(3, 1, 6))
    assert actual[0, :, 0].tolist() == [0, 0, 127, 254, 255, 255]


# -- language model ---------------------------------------------------------------------------------------------------


def test_text_equals_the_reference(golden: Any, run: Any) -> None:
    expected, main = golden.tensors("text"), run.caches["main"]
    hidden = run.text(expected["chat.input_ids"].tolist(), main)
    close(hidden, expected["chat.hidden"], FEATURES)
    close(run.llm.head(hidden), expected["chat.prefill_logits"], LOGITS)
    check_caches(main, expected, "chat")
    ids, logits = run.greedy(len(expected["chat.decode_logits"]), main)
    close(logits, expected["chat.decode_logits"], LOGITS)
    assert ids[: len(expected["chat.greedy_tokens"])] == expected["chat.greedy_tokens"].tolist()


def check_caches(cache: Any, wanted: dict[str, torch.Tensor], prefix: str, order: list[int] | None = None) -> None:
    """Compare the stored layers. order: places of our tokens in the reference's order."""
    places = torch.tensor(order) if order is not None else slice(None)
    layers = [int(key.rpartition(".")[2]) for key in wanted if key.startswith(f"{prefix}.k_cache.")]
    assert layers
    for layer in layers:
        close(cache.keys[layer], wanted[f"{prefix}.k_cache.{layer}"][places], FEATURES)
        close(cache.values[layer], wanted[f"{prefix}.v_cache.{layer}"][places], FEATURES)


@pytest.mark.parametrize("case", GOLDEN.cases["understanding"])
def test_understanding_equals_the_reference(case: str, golden: Any, run: Any) -> None:
    expected, inputs = golden.tensors("understanding"), golden.tensors("preprocess")
    facts, main, states, order = golden.cases["understanding"][case], run.caches["main"], [], list[int]()
    for name in facts["images"]:
        features = run.built.vit(image=inputs[f"{name}.vit_input"][None])["features"][0]
        # The reference puts the start marker first, and this model both markers last.
        begin = len(order)
        order += [*range(begin + 1, begin + 1 + len(features)), begin, begin + 1 + len(features)]
        states.append(run.image(main, embeds=features))
    close(torch.cat(states), expected[f"{case}.vit_segment_hidden"][torch.tensor(order)], FEATURES)
    ids = expected[f"{case}.text_input_ids"].tolist()
    close(run.text(ids, main), expected[f"{case}.text_hidden"], FEATURES)
    assert (main.length, main.position) == (facts["cache_len"], facts["decode_rope_start"])
    check_caches(main, expected, case, [*order, *range(len(order), main.length)])
    ids, logits = run.greedy(len(expected[f"{case}.decode_logits"]), main)
    close(logits, expected[f"{case}.decode_logits"], LOGITS)
    assert ids[: len(facts["tokens"])] == facts["tokens"]


# -- flow -------------------------------------------------------------------------------------------------------------


def test_time_embeddings_equal_the_reference(golden: Any, reference: Any) -> None:
    expected = golden.tensors("vae")
    close(time_features(expected["time.t"]), expected["time.features"], FEATURES)
    close(reference.llm.time_embedder(expected["time.t"]), expected["time.embedding"], FEATURES)


def test_position_tables_follow_their_formula(golden: Any, reference: Any) -> None:
    for table in (reference.llm.latent_pos_embed, reference.vit.vit_pos_embed):
        width = table.pos_embed.shape[1] // 4
        omega = 10000.0 ** (-torch.arange(width, dtype=torch.float64) / width)
        rows, columns = torch.meshgrid(torch.arange(table.side), torch.arange(table.side), indexing="ij")
        parts = [f(each.flatten()[:, None] * omega) for each in (columns, rows) for f in (torch.sin, torch.cos)]
        close(table.pos_embed, torch.cat(parts, dim=1).float(), FEATURES)
    assert golden.tensors("preprocess")
    assert np.allclose(
        reference.llm.latent_pos_embed(2, 3),
        reference.llm.latent_pos_embed.pos_embed[
            torch.tensor([0, 1, 2, *(reference.llm.latent_pos_embed.side + each for each in (0, 1, 2))])
        ],
    )


def test_position_ids_of_images_equal_the_reference(image: str, golden: Any, reference: Any) -> None:
    inputs = golden.tensors("preprocess")
    for table, kind, pixels in (
        (reference.llm.latent_pos_embed, "latent", reference.sizes.token_pixels),
        (reference.vit.vit_pos_embed, "vit", reference.sizes.vision.patch),
    ):
        _, height, width = inputs[f"{image}.{'vae' if kind == 'latent' else 'vit'}_input"].shape
        ids = inputs[f"{image}.{kind}_position_ids"]
        close(table(height // pixels, width // pixels), table.pos_embed[ids], 0)
