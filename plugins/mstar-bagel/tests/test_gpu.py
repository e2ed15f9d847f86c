"""BAGEL on CUDA: float32 gives the reference's values, bfloat16 stays within budgets, captured equals eager."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_bagel.checkpoint.config import Autoencoder, ControlIds, Language, Sizes, Vision
from mstar_bagel.graph import LOOK, build
from mstar_bagel.nodes.autoencoder import to_tokens
from mstar_bagel.nodes.language import BagelLLM
from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.device import prepare_device
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.graph.declare.nodes import STEP, Attend
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers.linear import fuse_projections

from .conftest import BRANCHES, SPEC, Golden, Run
from .conftest import build as build_nodes

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
FLOAT32 = 1e-3
"""Largest error of velocities in float32: the sums have another order than on the CPU."""

BFLOAT16 = 0.05
"""Largest relative error of velocities and features in bfloat16, by norms."""

PSNR = 42.0
"""Least PSNR, in dB, of 8-bit images decoded in bfloat16."""

WIDE = Sizes(
    language=Language(width=1024, layers=2, heads=8, kv_heads=2, head_dim=128, mlp=2048, vocab=1000),
    vision=Vision(width=256, layers=2, heads=4, mlp=512),
    vae=Autoencoder(width=32, multipliers=(1, 1, 1, 1), blocks=1, channels=16),
    ids=ControlIds(start=990, end=991, image_start=992, image_end=993),
)
"""The official head size, latent width and tables, in few and narrow layers."""


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float().cpu() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_velocities_are_near_the_reference(painting: str, dtype: torch.dtype, golden: Golden, reference: Any) -> None:
    prepare_device(CUDA)
    run, case = Run(build_nodes(reference.folder, dtype, "cuda")), golden.cases[painting]
    expected = golden.tensors(painting)
    run.read(golden, painting)
    height, width = (side // reference.sizes.token_pixels for side in case["output_hw"])
    x = expected["init_noise"].view(height, width, -1).to(CUDA)
    for name in BRANCHES:
        raw = expected.get(f"step0.v_{name}")
        if raw is None:
            continue
        actual = run.velocity(x, float(expected["t"][0]), run.caches[name]).flatten(0, 1)
        if dtype == torch.float32:
            torch.testing.assert_close(actual.cpu(), raw, atol=FLOAT32, rtol=0)
        assert relative(actual, raw) < BFLOAT16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_features_are_near_the_reference(image: str, dtype: torch.dtype, golden: Golden, reference: Any) -> None:
    prepare_device(CUDA)
    built, inputs = build_nodes(reference.folder, dtype, "cuda"), golden.tensors("preprocess")
    features = built.vit(image=[inputs[f"{image}.vit_input"].to(CUDA)])["features"][0]
    assert relative(features, golden.tensors("vit")[f"{image}.llm_embeds"]) < BFLOAT16
    latents, expected = (
        built.encoder(image=[inputs[f"{image}.vae_input"].to(CUDA)])["features"][0],
        golden.tensors("vae"),
    )
    assert latents.dtype == torch.float32
    if dtype == torch.float32:
        torch.testing.assert_close(latents.cpu(), expected[f"{image}.llm_embeds_t0"], atol=FLOAT32, rtol=0)
    assert relative(latents, expected[f"{image}.llm_embeds_t0"]) < BFLOAT16


def test_decoded_pixels_in_bfloat16_are_near_those_in_float32(image: str, golden: Golden, reference: Any) -> None:
    prepare_device(CUDA)
    half = build_nodes(reference.folder, torch.bfloat16, "cuda").decoder
    tokens = to_tokens(golden.tensors("vae")[f"{image}.latent_mean"][0], reference.sizes.latent_patch)
    actual, expected = (
        half.pixels(half.decode(tokens.to(CUDA))).cpu(),
        reference.decoder.pixels(reference.decoder.decode(tokens)),
    )
    assert psnr(actual, expected) > PSNR


@pytest.mark.parametrize("is_active", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 6, 10), (2, 32, 48, 80), (1, 128, 512, 400)], ids=str)
def test_group_norms_equal_float64(shape: tuple[int, ...], is_active: bool) -> None:
    from mstar_bagel.nodes.group_norm import group_norm

    torch.manual_seed(1)
    norm = torch.nn.GroupNorm(32, shape[1], 1e-6, device=CUDA)
    norm.weight.data.normal_()
    norm.bias.data.normal_()
    x = (torch.randn(shape, device=CUDA) * 3 + 20).to(torch.bfloat16)
    expected = torch.nn.functional.group_norm(x.double(), 32, norm.weight.double(), norm.bias.double(), 1e-6)
    expected = torch.nn.functional.silu(expected) if is_active else expected
    actual = group_norm(x, norm.to(torch.bfloat16), is_active=is_active)
    assert float((actual.double() - expected).norm() / expected.norm()) < 0.01


def psnr(found: Tensor, wanted: Tensor) -> float:
    """Return the peak signal-to-noise ratio of 8-bit images in dB."""
    return float(10 * torch.log10(255**2 / (found.double() - wanted.double()).square().mean()))


# -- engines -----------------------------------------------------------------------------------------------------------


def wide(*, is_fused: bool = True) -> BagelLLM:
    """Return a small model of the official head size with random weights, as a worker prepares it."""
    prepare_device(CUDA)
    torch.manual_seed(3)
    with torch.device("cuda"):
        module = BagelLLM(WIDE).to(torch.bfloat16)
    module.latent_pos_embed.pos_embed.data.normal_()
    module.language_model.model.rotary.frequencies = module.language_model.model.rotary.frequencies.float()
    if is_fused:
        fuse_projections(module)
    return module.eval().requires_grad_(False)


def engine_of(module: BagelLLM, graphs: CaptureSizes | None = None, attention: str = "torch") -> KVCacheEngine:
    spec = next(node for node in build(WIDE).nodes if node.name == "LLM")
    settings = KVSettings(
        device=CUDA,
        dtype=torch.bfloat16,
        attention=attention,
        vocab=WIDE.language.vocab,
        lookahead=1,
        prefix_cache=False,
        graphs=graphs or CaptureSizes(),
        num_pages=512,
        page_size=16,
        max_slots=24,
        max_seq_len=1024,
        token_budget=1024,
    )
    return KVCacheEngine(spec, module, settings)


def finished(engine: KVCacheEngine) -> list[Any]:
    """Run until nothing is left, and return what ended and the ids of loops by key."""
    ended: list[Any] = []
    flight: list[Any] = []
    while True:
        launched = engine.launch()
        flight += [launched] if launched is not None else []
        if not flight:
            return ended
        if len(flight) > 1 or launched is None:
            result = engine.collect(flight.pop(0))
            assert not result.failed, result.failed[0].error
            ended.append(result)


def greedy(engine: KVCacheEngine, prompts: list[list[int]], steps: int) -> dict[int, list[int]]:
    keys, ids = itertools.count(1), {number: list[int]() for number in range(len(prompts))}
    owner: dict[int, int] = {}
    for number, prompt in enumerate(prompts):
        engine.open(Handle(number), SamplingParams(), len(prompt) + steps + 1)
        text = Job(key=JobKey(next(keys)), handle=Handle(number), inputs={"tokens": torch.tensor(prompt)}, sample=False)
        engine.submit(text)
        key = JobKey(next(keys))
        owner[key] = number
        start = {"token": torch.tensor([WIDE.ids.start])}
        loop = LoopSpec(max_iters=steps, carry={"token": "token"}, stop_port="token")
        engine.submit(Job(key=key, handle=Handle(number), inputs=start, loop=loop, outputs=("token",)))
    for result in finished(engine):
        if result.loop is not None:
            for key, value in zip(result.loop.keys.tolist(), result.loop.ids.tolist(), strict=True):
                ids[owner[key]].append(value)
    return ids


@pytest.mark.parametrize(
    "grids", [[(4, 6)], [(16, 10)], [(4, 6)] * 3, [(4, 6), (4, 6), (8, 5)]], ids=["small", "one", "equal", "ragged"]
)
def test_joined_projections_give_the_values_of_separate_ones(grids: list[tuple[int, int]]) -> None:
    joined, separate = wide(), wide(is_fused=False)
    images = [torch.randn(*grid, WIDE.latent_width, device=CUDA) for grid in grids]
    times = torch.full((len(grids), 1, 2), 0.7, device=CUDA)
    positions = torch.full((sum(rows * columns + 2 for rows, columns in grids),), 5, device=CUDA)
    actual, expected = (
        module(
            kv=Within([rows * columns + 2 for rows, columns in grids]), positions=positions, latents=images, times=times
        )["velocity"]
        for module in (joined, separate)
    )
    for one, other in zip(actual, expected, strict=True):
        assert relative(one, other.float().cpu()) < 0.02


@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_joined_projections_of_text_give_the_states_of_separate_ones(tokens: int) -> None:
    positions = torch.arange(tokens, device=CUDA)
    actual, expected = (
        module(kv=Within([tokens]), positions=positions, tokens=positions % 7)["hidden"]
        for module in (wide(), wide(is_fused=False))
    )
    assert relative(actual, expected.float().cpu()) < 0.02


class Within:
    """A KVView of an empty cache: tokens see those of their own image."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        parts = [each.transpose(0, 1).split(self.lengths, dim=1) for each in (query, key, value)]
        mixed = [
            torch.nn.functional.scaled_dot_product_attention(*own, scale=scale, enable_gqa=True).transpose(0, 1)
            for own in zip(*parts, strict=True)
        ]
        return torch.cat(mixed)


def test_captured_decoding_equals_eager() -> None:
    module = wide()
    prompts = [[5, 6, 7], [9] * 40, [11, 12]]
    eager = greedy(engine_of(module), prompts, 12)
    captured = engine_of(module, CaptureSizes(decode=(1, 4)))
    assert greedy(captured, prompts, 12) == eager
    assert captured.graph_counts is not None


@pytest.mark.parametrize("attention", ["torch", "flashinfer"])
def test_a_noisy_image_reads_its_cache_in_each_backend(attention: str) -> None:
    """Images of two sizes in one step give the velocities of each alone, in both backends."""
    module = wide()
    images = [torch.randn(4, 6, WIDE.latent_width), torch.randn(8, 5, WIDE.latent_width)]
    times = torch.tensor([[0.9, 0.1, 0], [0.8, 0.1, 1]])
    alone = [velocities(engine_of(module), [image], times)[0] for image in images]
    together = velocities(engine_of(module, attention=attention), images, times)
    for actual, expected in zip(together, alone, strict=True):
        assert relative(actual, expected.float().cpu()) < BFLOAT16


def velocities(engine: KVCacheEngine, images: list[Tensor], times: Tensor) -> list[Tensor]:
    for number, image in enumerate(images):
        engine.open(Handle(number), SamplingParams(), 64)
        prompt = {"tokens": torch.arange(20)}
        engine.submit(Job(key=JobKey(2 * number + 1), handle=Handle(number), inputs=prompt, sample=False))
        inputs = {"latents": image, "times": times, STEP: torch.tensor(0)}
        engine.submit(
            Job(
                key=JobKey(2 * number + 2),
                handle=Handle(number),
                inputs=inputs,
                outputs=("velocity",),
                sample=False,
                attend=Attend(mask=LOOK.mask, positions=LOOK.positions, extra=LOOK.extra, write=False),
            )
        )
    done = [each for result in finished(engine) for each in result.done if "velocity" in each.outputs]
    return [each.outputs["velocity"] for each in sorted(done, key=lambda each: int(each.job.key))]


def test_the_official_node_is_the_one_that_is_captured() -> None:
    """The sizes of this file differ from the official ones in widths and counts only."""
    official = SPEC.node("LLM")
    small = next(node for node in build(WIDE).nodes if node.name == "LLM")
    assert (official.ports, official.row_ports) == (small.ports, small.row_ports)
