"""Encoders and vocoder on CUDA: equal to the CPU, or within error budgets; captured steps as uncaptured ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.engine.base import Handle, Job, JobKey
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.device import prepare_device
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.engine.warmup import run_warmup
from mstar_core.families import mel
from mstar_core.families.mel import LogMel
from mstar_core.graph import STEP, from_param
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_qwen3omni import plugin
from mstar_qwen3omni.checkpoint.config import AudioSizes, OmniConfig, VisionSizes, VocoderSizes
from mstar_qwen3omni.encoders.patches import places_of
from mstar_qwen3omni.vocoder import code2wav
from mstar_qwen3omni.vocoder.windows import USUAL

from .encoder_cases import drawn, needs_weights, reference, small, vectors

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
MIDDLE = OmniConfig(
    groups=4,
    audio=AudioSizes(width=128, layers=4, heads=2, mlp=256, channels=32, output=64),
    vision=VisionSizes(width=144, layers=5, heads=2, mlp=288, positions=256, output=64, deepstack=(1, 3)),
    vocoder=VocoderSizes(
        codebook=64,
        groups=4,
        width=64,
        layers=3,
        heads=2,
        kv_heads=2,
        head_dim=32,
        mlp=128,
        window=8,
        decoder=192,
        rates=(8, 5, 3),
        ratios=(2, 2),
    ),
)
"""Sizes that use the kernels of the released ones: heads of 72 dimensions, odd numbers of channels."""

FLOAT32 = 2e-3
"""Tolerance of the golden set."""

HALF = 0.03
"""Largest relative error of an encoder in bfloat16, by norms."""

LEAST_DB = 35.0
"""Least ratio of samples to their error in half precision."""


@pytest.fixture(autouse=True)
def prepared() -> Any:
    prepare_device(DEVICE)
    with torch.inference_mode():
        yield


def on_gpu(module: Any, dtype: torch.dtype) -> Any:
    found = copy.deepcopy(module).to(DEVICE)
    for weight in found.parameters():  # buffers stay float32, as in a loaded model
        weight.data = weight.data.to(dtype)
    return found


def apart(made: Tensor, wanted: Tensor) -> float:
    """Return the relative error by norms."""
    exact = wanted.double().cpu()
    return float((made.double().cpu() - exact).norm() / exact.norm())


def learned(module: Any, run: Callable[[], Any]) -> Any:
    """Run uncaptured, capture every shape that came, and run again. Returns the last result."""
    module.capture(GraphCache(DEVICE))
    run()
    while module.idle():
        pass
    made, counts = run(), module.counters()
    assert counts["graph_hits"] > 0
    return made


# -- Code2Wav ----------------------------------------------------------------------------------------------------------


def codes_of(rows: int, frames: int, sizes: VocoderSizes) -> Tensor:
    made = torch.Generator().manual_seed(frames)
    return torch.randint(0, sizes.codebook, (rows, frames, sizes.groups), generator=made)


@needs_weights
def test_samples_in_float32_equal_the_reference() -> None:
    golden, module = vectors("code2wav"), on_gpu(reference("Code2Wav"), torch.float32)
    actual = module.decode(golden["in.codes"].T[None].cuda())[0]
    torch.testing.assert_close(actual.cpu(), golden["waveform_whole"], atol=1e-4, rtol=0)


@needs_weights
def test_samples_in_half_precision_stay_within_their_error_budget() -> None:
    golden, module = vectors("code2wav"), on_gpu(reference("Code2Wav"), torch.bfloat16)
    error = apart(module.decode(golden["in.codes"].T[None].cuda())[0], golden["waveform_whole"])
    assert -20 * torch.tensor(error).log10() > LEAST_DB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_samples_of_odd_channels_equal_the_cpu(dtype: torch.dtype) -> None:
    plain, codes = small("Code2Wav", MIDDLE), codes_of(3, 13, MIDDLE.vocoder)
    error = apart(on_gpu(plain, dtype).decode(codes.cuda()), plain.decode(codes))
    assert error < (1e-4 if dtype == torch.float32 else 10 ** (-LEAST_DB / 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_captured_windows_equal_uncaptured_ones_and_those_alone(dtype: torch.dtype) -> None:
    module = on_gpu(small("Code2Wav", MIDDLE), dtype)
    numbers = {
        "codec_first_frames": USUAL.first,
        "codec_chunk_frames": USUAL.chunk,
        "codec_left_context_frames": USUAL.left,
    }

    def run(rows: int, frames: int, step: int) -> Tensor:
        codes = codes_of(rows, frames, MIDDLE.vocoder).cuda()
        made = module(codes=codes, step=[step] * rows, **{name: [value] * rows for name, value in numbers.items()})
        return made["pcm"].clone()

    shapes = [(3, 8, 0), (2, 33, 1), (3, 50, 2), (1, 50, 5), (1, 39, 7), (1, 3, 0)]
    plain = [run(*shape) for shape in shapes]
    actual = learned(module, lambda: [run(*shape) for shape in shapes])
    budget = 1e-3 if dtype == torch.float32 else 10 ** (-LEAST_DB / 20)
    assert all(apart(own, expected) < budget for own, expected in zip(actual, plain, strict=True))
    for row in range(3):
        codes = codes_of(3, 50, MIDDLE.vocoder)[row : row + 1].cuda()
        alone = module(codes=codes, step=[2], **{name: [value] for name, value in numbers.items()})["pcm"]
        assert apart(alone[0], actual[2][row]) < budget


def test_streams_through_the_engine_equal_the_cpu() -> None:
    plain, spec = small("Code2Wav", MIDDLE), plugin.spec(MIDDLE).node("Code2Wav")
    module = on_gpu(plain, torch.float32)
    module.capture(GraphCache(DEVICE))
    engine = StatelessEngine(spec, module, device=DEVICE, dtype=torch.float32, lookahead=1)
    run_warmup(engine, module.warmup_requests(), lambda title: None)
    misses = module.counters()["graph_misses"]
    names = ("codec_first_frames", "codec_chunk_frames", "codec_left_context_frames")
    numbers = dict(zip(map(from_param, names), (USUAL.first, USUAL.chunk, USUAL.left), strict=True))
    codes = codes_of(4, 50, MIDDLE.vocoder)
    for row in range(4):
        engine.open(Handle(row), SamplingParams(), 1)
        inputs = {"codes": codes[row].cuda() if row % 2 else codes[row]}
        job = Job(key=JobKey(row), handle=Handle(row), inputs=inputs, outputs=("pcm",))
        job.numbers = {**numbers, STEP: 4}
        engine.submit(job)
    running = engine.launch()
    assert running is not None
    result = engine.collect(running)
    assert not result.failed and len(result.done) == 4 and module.counters()["graph_misses"] == misses
    fixed = {name: [value] for name, value in zip(names, (USUAL.first, USUAL.chunk, USUAL.left), strict=True)}
    for done in result.done:
        expected = plain(codes=codes[int(done.job.handle)][None], step=[4], **fixed)["pcm"][0]
        assert (done.outputs["pcm"].int() - expected.int()).abs().max() <= 8


# -- sound -------------------------------------------------------------------------------------------------------------


def test_spectra_equal_the_cpu() -> None:
    clips = [drawn(samples, seed=samples) * 0.1 for samples in (48_321, 16_000, 5_000, 160, 0)]
    mel = LogMel(128)([clip.cuda() for clip in clips])
    torch.testing.assert_close(mel.cpu(), LogMel(128)(clips), atol=1e-5, rtol=0)


@needs_weights
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_clips_equal_the_reference(dtype: torch.dtype) -> None:
    golden, module = vectors("audio_encoder_packing"), on_gpu(reference("audio_encoder"), dtype)
    actual = module(audio=[golden["in.mel_short"].cuda(), golden["in.mel_long"].cuda()])["embeds"]
    for own, name in zip(actual, ("short_alone", "long_alone"), strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(own.cpu(), golden[name], atol=FLOAT32, rtol=0)
        assert apart(own, golden[name]) < HALF


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_captured_clips_equal_uncaptured_ones_and_those_alone(dtype: torch.dtype) -> None:
    plain = small("audio_encoder", MIDDLE)
    module = on_gpu(plain, dtype)
    clips = [drawn(1, int(seconds * 16_000), seed=index) * 0.1 for index, seconds in enumerate((0.5, 3, 9.3, 1, 0.2))]
    inputs = [clip.cuda() for clip in clips]
    before = module(audio=inputs)["embeds"]
    actual = learned(module, lambda: module(audio=inputs)["embeds"])
    for own, uncaptured, expected, clip in zip(actual, before, plain(audio=clips)["embeds"], inputs, strict=True):
        budget = 1e-4 if dtype == torch.float32 else HALF
        assert apart(own, uncaptured) < budget and apart(own, expected) < budget
        assert apart(module(audio=[clip])["embeds"][0], own) < budget


# -- images and videos -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("frames", "patches"), [(1, 4), (3, 100), (2, 128), (1, 1000)])
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 72), (3, 64), (1, 24)])
def test_attention_among_patches_equals_torch(frames: int, patches: int, heads: int, head_dim: int) -> None:
    from mstar_qwen3omni.encoders import kernels

    packed = drawn(frames * patches, 3 * heads, head_dim).to(DEVICE, torch.bfloat16)
    query, key, value = (
        packed[:, :heads].contiguous(),
        packed[:, heads : 2 * heads].contiguous(),
        packed[:, 2 * heads :],
    )
    actual = kernels.attention(query, key, value, frames)
    parts = (each.float().unflatten(0, (frames, -1)).transpose(1, 2) for each in (query, key, value))
    expected = scaled_dot_product_attention(*parts).transpose(1, 2).reshape(frames * patches, -1)
    assert apart(actual, expected) < 0.01


@needs_weights
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_video_equals_the_reference(dtype: torch.dtype) -> None:
    golden, module = vectors("case_video"), on_gpu(reference("vision_encoder"), dtype)
    tokens = torch.full((len(golden["video_embeds"]),), module.ids.video_pad)
    actual = module(
        pixels=[golden["in.pixel_values_videos"].cuda()],
        grid=golden["in.video_grid_thw"].numpy(),
        tokens=[tokens.numpy()],
    )
    pairs = [(actual["embeds"][0], golden["video_embeds"])]
    pairs += [(own, golden[f"video_deepstack.{level}"]) for level, own in enumerate(actual["deepstack"][0])]
    for own, expected in pairs:
        if dtype == torch.float32:
            torch.testing.assert_close(own.cpu(), expected, atol=FLOAT32, rtol=0)
        assert apart(own, expected) < HALF


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_captured_frames_equal_uncaptured_ones_and_the_cpu(dtype: torch.dtype) -> None:
    plain, sizes = small("vision_encoder", MIDDLE), MIDDLE.vision
    module = on_gpu(plain, dtype)
    pixels = torch.randint(0, 256, (3, 48, sizes.patch_values), dtype=torch.uint8)
    places = torch.stack([places_of(*side, sizes.merge, 16) for side in ((6, 8), (8, 6), (4, 12))])
    expected = plain.encode_frames(pixels, places)
    before = module.encode_frames(pixels.cuda(), places.cuda())
    actual = learned(module, lambda: module._replayed(pixels.cuda(), places.cuda()))
    budget = 1e-4 if dtype == torch.float32 else HALF
    assert apart(before, expected) < budget and apart(actual, before) < budget
    for row in range(3):
        alone = module._replayed(pixels[row : row + 1].cuda(), places[row : row + 1].cuda())
        assert apart(alone, actual[row : row + 1]) < budget


@pytest.mark.parametrize("node", ["audio_encoder", "vision_encoder", "Code2Wav"])
def test_the_warm_up_leaves_nothing_to_compile(node: str) -> None:
    spec, module = plugin.spec(MIDDLE).node(node), on_gpu(small(node, MIDDLE), torch.bfloat16)
    module.capture(GraphCache(DEVICE))
    engine = StatelessEngine(spec, module, device=DEVICE, dtype=torch.bfloat16, lookahead=1)
    run_warmup(engine, module.warmup_requests(), lambda title: None)
    misses = module.counters()["graph_misses"]
    run_warmup(engine, module.warmup_requests(), lambda title: None)
    assert module.counters()["graph_misses"] == misses and not engine.idle()


def test_long_batches_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, codes = small("Code2Wav", MIDDLE), codes_of(5, 9, MIDDLE.vocoder)
    monkeypatch.setattr(code2wav, "MOST_DECODED", 20)
    monkeypatch.setattr(mel, "MOST_FRAMES", 150)
    assert apart(on_gpu(plain, torch.float32).decode(codes.cuda()), plain.decode(codes)) < 1e-4
    clips = [drawn(samples, seed=samples) * 0.1 for samples in (9_000, 16_000, 5_000)]
    torch.testing.assert_close(
        LogMel(128)([clip.cuda() for clip in clips]).cpu(), LogMel(128)(clips), atol=1e-5, rtol=0
    )
