"""The vision encoder against the reference: images, videos, bytes, sound in token order, batches, the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mstar_core.engine.base import Handle, Job, JobKey
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.errors import EngineError
from mstar_core.graph import STATELESS, NodeSpec
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_qwen3omni.encoders import vision
from mstar_qwen3omni.encoders.patches import patch_places, places_of, resampled
from mstar_qwen3omni.request.images import grid_of, patches_of, resized

from .encoder_cases import SMALL, drawn, needs_weights, reference, small, vectors

TOLERANCE = 2e-3
"""Of the set, for encoder outputs."""

IMAGE, AUDIO = SMALL.ids.image_pad, SMALL.ids.audio_pad
GRIDS = ((1, 6, 8), (3, 4, 6), (1, 8, 6), (1, 2, 2), (2, 6, 8))

Item = dict[str, Tensor]


def item(grid: tuple[int, int, int], seed: int = 1) -> Item:
    count = grid[0] * grid[1] * grid[2]
    pixels = drawn(count, SMALL.vision.patch_values, seed=seed)
    return {"pixels": pixels, "grid": torch.tensor(grid), "tokens": torch.full((count // 4,), IMAGE)}


def run(module: Any, *items: Item) -> list[tuple[Tensor, Tensor]]:
    """Return embeds and deepstack of each request."""
    given: dict[str, Any] = {name: [item[name] for item in items] for name in items[0]}
    for name in ("grid", "tokens"):
        given[name] = [each.numpy() for each in given[name]]
    made = module(**given)
    return list(zip(made["embeds"], made["deepstack"], strict=True))


@needs_weights
@pytest.mark.parametrize("name", ["image", "mixed", "video", "audio_in_video"])
def test_a_case_equals_the_reference(name: str) -> None:
    golden, module = vectors(f"case_{name}"), reference("vision_encoder")
    kind = "image" if "image_embeds" in golden else "video"
    pixels = golden["in.pixel_values" if kind == "image" else "in.pixel_values_videos"]
    pad = module.ids.image_pad if kind == "image" else module.ids.video_pad
    grid, start = golden[f"in.{kind}_grid_thw"], 0
    for size in grid:
        count = int(size.prod())
        tokens = torch.full((count // module.sizes.merge**2,), pad)
        inputs = {"pixels": pixels[start : start + count], "grid": size, "tokens": tokens}
        ((embeds, deepstack),) = run(module, inputs)
        at = slice(start // module.sizes.merge**2, start // module.sizes.merge**2 + len(tokens))
        torch.testing.assert_close(embeds, golden[f"{kind}_embeds"][at], atol=TOLERANCE, rtol=0)
        for level, own in enumerate(deepstack):
            torch.testing.assert_close(own, golden[f"{kind}_deepstack.{level}"][at], atol=TOLERANCE, rtol=0)
        start += count
    assert start == len(pixels)


@pytest.mark.parametrize("grid", [(1, 6, 8), (2, 16, 2), (3, 20, 12)])
def test_a_grid_that_the_set_lacks_equals_the_reference(grid: tuple[int, int, int]) -> None:
    transformers = pytest.importorskip("transformers.models.qwen3_omni_moe")
    module, sizes = small("vision_encoder"), SMALL.vision
    config = transformers.configuration_qwen3_omni_moe.Qwen3OmniMoeVisionEncoderConfig(
        depth=sizes.layers,
        hidden_size=sizes.width,
        intermediate_size=sizes.mlp,
        num_heads=sizes.heads,
        patch_size=sizes.patch,
        spatial_merge_size=sizes.merge,
        temporal_patch_size=2,
        out_hidden_size=sizes.output,
        num_position_embeddings=sizes.positions,
        deepstack_visual_indexes=list(sizes.deepstack),
    )
    oracle = transformers.modeling_qwen3_omni_moe.Qwen3OmniMoeVisionEncoder._from_config(config).eval()
    oracle.load_state_dict(module.state_dict())
    inputs = item(grid)
    with torch.inference_mode():
        expected = oracle(inputs["pixels"], grid_thw=inputs["grid"][None])
    ((embeds, deepstack),) = run(module, inputs)
    torch.testing.assert_close(embeds, expected.pooler_output, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(deepstack, torch.stack(expected.deepstack_features), atol=TOLERANCE, rtol=0)


def test_patches_follow_their_blocks() -> None:
    row, column = patch_places(4, 4, 2)
    assert list(zip(row[:6].tolist(), column[:6].tolist(), strict=True)) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (0, 2),
        (0, 3),
    ]
    assert sorted(zip(row.tolist(), column.tolist(), strict=True)) == [(y, x) for y in range(4) for x in range(4)]


def test_the_corners_of_an_image_are_the_corners_of_the_table() -> None:
    side = 8
    table, places = drawn(side * side, 5), places_of(6, 4, 2, side)
    actual = resampled(table, places[:, 2], places[:, 3])
    torch.testing.assert_close(actual[0], table[0])
    torch.testing.assert_close(actual[-1], table[-1])
    expected = torch.nn.functional.interpolate(
        table.T.view(1, 5, side, side), (6, 4), mode="bilinear", align_corners=True
    )
    row, column = patch_places(6, 4, 2)
    torch.testing.assert_close(actual, expected[0, :, row, column].T)


def test_bytes_equal_their_normalised_values() -> None:
    module, inputs = small("vision_encoder"), item((1, 4, 4))
    pixels = torch.randint(
        0, 256, inputs["pixels"].shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    plain = run(module, inputs | {"pixels": (pixels / 255 - 0.5) / 0.5})[0]
    for own, each in zip(run(module, inputs | {"pixels": pixels})[0], plain, strict=True):
        torch.testing.assert_close(own, each, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [(96, 64), (91, 70), (40, 32)])
def test_a_decoded_image_equals_its_patches(size: tuple[int, int]) -> None:
    module, sizes, (rows, columns) = small("vision_encoder"), SMALL.vision, (6, 4)
    pixels = np.random.default_rng(2).integers(0, 256, (*size, 3), dtype=np.uint8)
    frame = resized(Image.fromarray(pixels), rows * sizes.patch, columns * sizes.patch)
    patches = patches_of([frame], grid_of(1, *frame.shape[:2], sizes), sizes)
    seen, cut = ({**item((1, rows, columns)), "pixels": torch.from_numpy(each)} for each in (pixels, patches))
    (actual,), (expected,), together = run(module, seen), run(module, cut), run(module, seen, cut)
    for own, other, *both in zip(actual, expected, *together, strict=True):
        assert torch.equal(own, other) and all(torch.equal(each, own) for each in both)


def test_requests_of_any_batch_equal_requests_alone() -> None:
    module, items = small("vision_encoder"), [item(grid, seed) for seed, grid in enumerate(GRIDS)]
    for own, each in zip(run(module, *items), items, strict=True):
        alone = run(module, each)[0]
        assert torch.equal(own[0], alone[0]) and torch.equal(own[1], alone[1])


def test_frames_of_equal_size_share_a_pass_and_equal_those_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module, items = small("vision_encoder"), [item(grid, seed) for seed, grid in enumerate(GRIDS)]
    monkeypatch.setattr(vision, "MOST_PATCHES", 100)
    media = [module._media(item["pixels"], tuple(item["grid"].tolist())) for item in items]
    chosen = [each for each in media if each.patches.shape[1] == 48]
    actual = module._batch(chosen)
    assert [each.grid for each in chosen] == [(1, 6, 8), (1, 8, 6), (2, 6, 8)]
    for own, each in zip(actual, chosen, strict=True):
        torch.testing.assert_close(own, module._batch([each])[0], atol=1e-5, rtol=0)


def test_frames_do_not_see_each_other() -> None:
    module, inputs = small("vision_encoder"), item((2, 4, 4))
    changed = inputs["pixels"].clone()
    changed[16:] = 0
    before, after = run(module, inputs)[0], run(module, inputs | {"pixels": changed})[0]
    torch.testing.assert_close(before[0][:4], after[0][:4])
    assert (before[0][4:] - after[0][4:]).abs().max() > 0.1


def test_sound_lies_at_its_tokens_and_has_no_maps() -> None:
    module, inputs = small("vision_encoder"), item((2, 4, 4))
    sound, ((plain, maps),) = drawn(3, SMALL.vision.output), run(module, inputs)
    tokens = inputs["tokens"].tolist()
    tokens[2:2], tokens[-1:-1] = [AUDIO, AUDIO], [AUDIO]
    ((embeds, deepstack),) = run(module, inputs | {"tokens": torch.tensor(tokens), "sound": sound})
    is_sound = torch.tensor(tokens) == AUDIO
    assert torch.equal(embeds[is_sound], sound) and torch.equal(embeds[~is_sound], plain)
    assert not deepstack[:, is_sound].any() and torch.equal(deepstack[:, ~is_sound], maps)


@pytest.mark.parametrize("change", ["fewer tokens", "a sound pad", "another id", "fewer pixels", "odd sides"])
def test_inputs_that_do_not_fit_are_errors(change: str) -> None:
    inputs = item((1, 4, 4))
    match change:
        case "fewer tokens":
            inputs["tokens"] = inputs["tokens"][:-1]
        case "a sound pad":
            inputs["tokens"][0] = AUDIO
        case "another id":
            inputs["tokens"][0] = 5
        case "fewer pixels":
            inputs["pixels"] = inputs["pixels"][:-1]
        case _:
            inputs["grid"] = torch.tensor([1, 16, 1])
    with pytest.raises(EngineError, match="tokens hold|patches do not fill"):
        run(small("vision_encoder"), inputs)


def test_captured_frames_equal_uncaptured_ones() -> None:
    module, items = small("vision_encoder"), [item(grid, seed) for seed, grid in enumerate(GRIDS)]
    expected = run(module, *items)
    module.capture(GraphCache(torch.device("cpu")))
    for _ in range(2):
        for own, plain in zip(run(module, *items), expected, strict=True):
            torch.testing.assert_close(own[0], plain[0], atol=1e-5, rtol=0)
            torch.testing.assert_close(own[1], plain[1], atol=1e-5, rtol=0)
        while module.idle():
            pass
    assert module.counters()["graph_hits"] == len(items)


def test_requests_of_unequal_size_run_in_one_step_of_the_engine() -> None:
    module, width = small("vision_encoder"), SMALL.vision.output
    spec = NodeSpec(
        name="vision_encoder",
        engine=STATELESS,
        batch_key=(),
        ragged=("pixels", "grid", "tokens", "sound"),
        ports={
            "pixels": f"any[p,{SMALL.vision.patch_values}]",
            "grid": "i64[3]",
            "tokens": "i64[n]",
            "sound": f"any[a,{width}]?",
            "embeds": f"any[n,{width}]",
            "deepstack": f"any[2,n,{width}]",
        },
    )
    engine = StatelessEngine(spec, module, device=torch.device("cpu"), dtype=torch.float32)
    items = [item(grid, seed) for seed, grid in enumerate(GRIDS)]
    for row, each in enumerate(items):
        engine.open(Handle(row), SamplingParams(), 1)
        job = Job(key=JobKey(row), handle=Handle(row), inputs=dict(each), outputs=("embeds", "deepstack"))
        engine.submit(job)
    running = engine.launch()
    assert running is not None
    result = engine.collect(running)
    assert not result.failed and result.rows == len(items)
    for done in result.done:
        embeds, deepstack = run(module, items[int(done.job.handle)])[0]
        assert torch.equal(done.outputs["embeds"], embeds) and torch.equal(done.outputs["deepstack"], deepstack)


def test_the_warm_up_fits_the_released_sizes() -> None:
    (request,) = small("vision_encoder").warmup_requests()
    assert [len(step.inputs["tokens"]) for step in request.steps] == [64, 256, 576, 1024]
    module = small("vision_encoder")
    for step in request.steps:
        pixels, (_, rows, columns) = step.inputs["pixels"], step.inputs["grid"].tolist()
        assert pixels.shape[0] < rows * module.sizes.patch and pixels.shape[1] < columns * module.sizes.patch
        assert rows * columns == len(module._media(pixels, (1, rows, columns)).patches[0])
