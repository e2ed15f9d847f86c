"""Cameras and prefix against the reference: image vectors, embeddings, cache of every layer, packed and padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .conftest import ITEMS

TOLERANCE = {"atol": 2e-5, "rtol": 0}


@pytest.mark.parametrize("item", ITEMS)
def test_image_vectors_equal_the_reference(item: int, golden: Any, reference: Any) -> None:
    vectors = reference.cameras.encode(golden.images(item)[None])[0]
    expected = golden.expected["image_embeds"][item][golden.inputs["image_masks"][item]]
    torch.testing.assert_close(vectors, expected.flatten(0, 1), **TOLERANCE)


def test_masked_cameras_are_not_encoded(golden: Any) -> None:
    inputs = golden.inputs["image_masks"].sum(1).tolist()
    assert [len(golden.images(item)) for item in ITEMS] == inputs
    if min(inputs) == golden.config["num_cameras"]:
        pytest.skip("runs when MSTAR_GOLDEN names a set that masks a camera")


def test_levels_and_floats_are_the_same_image(golden: Any, reference: Any) -> None:
    side = golden.config["vision"]["image_size"]
    levels = torch.randint(0, 256, (1, 2, side, side, 3), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    floats = levels.float() / 255.0 * 2.0 - 1.0
    torch.testing.assert_close(reference.cameras.encode(levels), reference.cameras.encode(floats), **TOLERANCE)


def test_requests_of_unlike_lengths_share_a_batch_of_cameras(golden: Any, reference: Any) -> None:
    images = golden.images(-1)
    tokens = [golden.tokens(-1), golden.tokens(-1)[:-3]]
    whole, short = reference.cameras(images=torch.stack([images, images]), tokens=tokens)["features"]
    assert (len(whole), len(short)) == (len(tokens[0]), len(tokens[1]))
    count = len(images) * golden.image_tokens
    torch.testing.assert_close(short[:count], whole[:count])
    assert not whole[count:].any() and not short[count:].any()


@pytest.mark.parametrize("item", ITEMS)
def test_prefix_embeddings_equal_the_reference(item: int, golden: Any, reference: Any, run: Any) -> None:
    actual = reference.policy.language.embed(golden.tokens(item), run.features(item)[0])
    torch.testing.assert_close(actual, golden.expected["prefix_embeds"][item][golden.valid(item)], **TOLERANCE)


@pytest.mark.parametrize("together", [True, False])
def test_the_cache_of_every_layer_equals_the_reference(together: bool, golden: Any, run: Any) -> None:
    for items in [ITEMS] if together else [(item,) for item in ITEMS]:
        run.prefill(*items)
    for item in ITEMS:
        valid = golden.valid(item)
        for layer in range(golden.config["language"]["layers"]):
            for name, actual in (("prefix_k", run.cache.keys), ("prefix_v", run.cache.values)):
                expected = golden.expected[name][layer, item].transpose(0, 1)[valid]
                torch.testing.assert_close(actual[item][layer], expected, **TOLERANCE)


def padded(golden: Any, reference: Any) -> Any:
    """Embed in the reference's layout: every camera and every prompt position, invalid ones masked."""
    images = golden.inputs["images"].permute(0, 1, 3, 4, 2)
    vectors = reference.cameras.encode(images)
    ids = torch.cat([torch.full(vectors.shape[:2], -1), golden.inputs["tokens"]], dim=1)
    embeds = torch.cat([vectors, vectors.new_zeros(*golden.inputs["tokens"].shape, vectors.shape[-1])], dim=1)
    return reference.policy.language.embed(ids.flatten(), embeds.flatten(0, 1))


def test_padded_execution_gives_the_same(golden: Any, reference: Any, run: Any, padded_cache: Any) -> None:
    valid = torch.stack([golden.valid(item) for item in ITEMS])
    positions = valid.cumsum(1) - 1
    assert torch.equal(positions, golden.expected["prefix_position_ids"])
    cache, language = padded_cache(valid), reference.policy.language
    rotation = reference.policy.rotary(positions.flatten())
    hidden = language.hidden(padded(golden, reference), cache, rotation).unflatten(0, valid.shape)
    torch.testing.assert_close(hidden[valid], golden.expected["prefix_hidden"][valid], **TOLERANCE)
    run.prefill(*ITEMS)
    for item in ITEMS:
        for layer, keys in cache.keys.items():
            torch.testing.assert_close(run.cache.keys[item][layer], keys[item][valid[item]], **TOLERANCE)


@pytest.mark.parametrize("item", ITEMS)
def test_packed_hidden_states_equal_the_reference(item: int, golden: Any, reference: Any, run: Any) -> None:
    length, language = golden.length(item), reference.policy.language
    x = language.embed(golden.tokens(item), run.features(item)[0])
    cache = run.cache.plan((item, length))
    hidden = language.hidden(x, cache, reference.policy.rotary(torch.arange(length)))
    torch.testing.assert_close(hidden, golden.expected["prefix_hidden"][item][golden.valid(item)], **TOLERANCE)


def test_the_prefix_sees_itself_whole(golden: Any, reference: Any, run: Any) -> None:
    """Changing the last id changes the cache of the first position."""
    run.prefill(0)
    before = run.cache.keys[0][1][0].clone()
    other = type(run)(golden, reference)
    tokens = golden.tokens(0)
    tokens[-1] = (tokens[-1] + 1) % golden.config["vocab_size"]
    reference.acting(
        kv=other.cache.plan((0, len(tokens))),
        tokens=tokens,
        embeds=run.features(0)[0],
        positions=torch.arange(len(tokens)),
    )
    assert (other.cache.keys[0][1][0] - before).abs().max() > 1e-4
