"""Pictures, videos and sounds against the processors of transformers, from arrays and from files."""

from __future__ import annotations

import io
import math
import wave
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from mstar_core.errors import BadMedia, RequestError
from mstar_core.plugin.media import MediaLimits
from mstar_core.plugin.media.bands import Bands
from mstar_qwen3omni.checkpoint.config import AudioSizes, VisionSizes
from mstar_qwen3omni.request.images import PixelRange, grid_of, patch_grid, patches_of, resized, target_size
from mstar_qwen3omni.request.positions import Grid, interleave
from mstar_qwen3omni.request.sounds import RATE, mel_frames, read_samples, sound_tokens
from mstar_qwen3omni.request.videos import Sampling, read_clip

SIZES = VisionSizes()
PICTURE = PixelRange(least=3136, most=12_845_056)
FRAME = PixelRange(least=131_072, most=786_432)
SETTINGS = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


@pytest.fixture(scope="session")
def pictures() -> Any:
    """Image processing of transformers."""
    return pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")


@pytest.fixture(scope="session")
def prompts() -> Any:
    """Prompt processing of transformers."""
    return pytest.importorskip("transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe")


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def normal(patches: np.ndarray) -> np.ndarray:
    """Normalise patches as the encoder does on its device."""
    return (patches.astype(np.float32) / 255 - 0.5) / 0.5


def pcm(seconds: float, rate: int = RATE, channels: int = 1, pitch: float = 440.0) -> bytes:
    """Return a tone as WAV."""
    tone = (8000 * np.sin(2 * math.pi * pitch * np.arange(round(seconds * rate)) / rate)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(np.repeat(tone, channels).tobytes())
    return file.getvalue()


def mp4(frames: int = 20, rate: int = 10, size: tuple[int, int] = (64, 48), seconds: float = 0.0) -> bytes:
    """Return a video of gray frames that grow lighter. seconds: of its sound track, 0 for none."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        sound = out.add_stream("aac", rate=44_100, layout="mono") if seconds else None
        for index in range(frames):
            pixels = np.full((size[1], size[0], 3), min(255, 10 * index), np.uint8)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode(None))
        if sound is not None:
            tone = np.sin(0.05 * np.arange(round(seconds * 44_100))).astype(np.float32)[None]
            frame = av.AudioFrame.from_ndarray(tone, format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 44_100, 0, Fraction(1, 44_100)
            split = av.AudioResampler(format="fltp", layout="mono", rate=44_100, frame_size=1024)
            for part in [*split.resample(frame), *split.resample(None)]:
                out.mux(sound.encode(part))
            out.mux(sound.encode(None))
    return file.getvalue()


def clip(data: bytes, fps: float = 2.0, most: int = 768, **limits: Any) -> Any:
    return read_clip(
        data,
        MediaLimits(**limits),
        Sampling(fps=fps, most=most),
        PixelRange(least=1, most=786_432),
        SIZES,
        13,
        lambda tokens: None,
    )


# -- pictures -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([PICTURE, FRAME, PixelRange(least=1, most=5000)]))
def test_sizes_are_those_of_transformers(pictures: Any, height: int, width: int, pixels: PixelRange) -> None:
    assume(max(height, width) <= 200 * min(height, width))
    expected = pictures.smart_resize(height, width, 32, pixels.least, pixels.most)
    assert target_size(height, width, 32, pixels) == expected


def test_a_very_long_picture_is_refused() -> None:
    with pytest.raises(RequestError, match="10 x 2010 pixels") as caught:
        target_size(2010, 10, 32, PICTURE)
    assert caught.value.facts["field"] == "files"


@pytest.mark.parametrize(("height", "width"), [(64, 96), (50, 70), (300, 40), (20, 20)])
def test_patches_of_a_picture_are_those_of_transformers(pictures: Any, height: int, width: int) -> None:
    actual = pictures.Qwen2VLImageProcessorPil(**SETTINGS, min_pixels=3136, max_pixels=12_845_056)
    image = Image.fromarray(noise(height, width))
    expected = actual(image, return_tensors="np")
    size = target_size(height, width, 32, PICTURE)
    grid = grid_of(1, *size, SIZES)
    assert patch_grid(grid, SIZES).tolist() == expected["image_grid_thw"][0].tolist()
    for bands in (None, Bands(cores=1), Bands(cores=4)):
        found = normal(patches_of([resized(image, *size, bands)], grid, SIZES))
        np.testing.assert_allclose(found, expected["pixel_values"], atol=1e-5)


@pytest.mark.parametrize("frames", [4, 5])
def test_patches_of_a_video_are_those_of_transformers(frames: int) -> None:
    pytest.importorskip("torchvision")
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    video = np.stack([noise(64, 96, seed) for seed in range(frames)])
    actual = Qwen2VLVideoProcessor(**SETTINGS, size={"shortest_edge": 1, "longest_edge": 786_432})
    expected = actual([video.transpose(0, 3, 1, 2)], return_tensors="np")
    grid = grid_of(frames, 64, 96, SIZES)
    assert patch_grid(grid, SIZES).tolist() == expected["video_grid_thw"][0].tolist()
    np.testing.assert_allclose(normal(patches_of(list(video), grid, SIZES)), expected["pixel_values_videos"], atol=1e-5)


def test_patches_are_ordered_by_block_channel_and_frame() -> None:
    frames = [np.zeros((64, 64, 3), np.uint8) for _ in range(2)]
    frames[1][16, 33, 2] = 7  # second frame, row 16, column 33, blue
    actual = patches_of(frames, grid_of(2, 64, 64, SIZES), SIZES)
    # Block (0, 1), row 1 and column 0 in it; channel 2, frame 1, row 0, column 1.
    assert np.argwhere(actual == 7).tolist() == [[1 * 4 + 1 * 2 + 0, 2 * 512 + 256 + 0 * 16 + 1]]


# -- videos ---------------------------------------------------------------------------------------------------------


@given(st.integers(4, 2000), st.sampled_from([10.0, 24.0, 29.97, 60.0]), st.sampled_from([0.5, 1.5, 2.0, 30.0]))
def test_frames_are_chosen_as_transformers_does(total: int, rate: float, fps: float) -> None:
    chosen = Sampling(fps=fps, most=768).choose(total, rate)
    expected = math.floor(min(max(total / rate * fps, 4), math.floor(min(768, total) / 2) * 2, total) / 2) * 2
    assert len(chosen) == expected
    assert chosen == [math.floor(Fraction(total, expected) * index) for index in range(expected)]
    assert chosen == sorted(set(chosen))


@pytest.mark.parametrize(("total", "expected"), [(1, [0]), (2, [0, 1]), (3, [0, 1])])
def test_a_short_video_gives_what_it_has(total: int, expected: list[int]) -> None:
    assert Sampling(fps=2.0, most=768).choose(total, 30.0) == expected


def test_a_video_is_sampled_with_its_true_rate() -> None:
    actual = clip(mp4(frames=20, rate=10), fps=1.5)  # 2 s: 3 frames by the rate, at least 4
    assert actual.fps == pytest.approx(2.0)
    assert actual.grid == Grid(pairs=2, rows=2, columns=2, pair_ticks=pytest.approx(13.0))
    assert actual.patches.shape == (2 * 4 * 4, 1536)
    assert actual.patches.dtype == np.uint8
    levels = actual.patches.reshape(2, 16, 3, 2, 256)[:, 0, 0].mean(axis=-1).reshape(-1)
    np.testing.assert_allclose(levels, [0, 50, 100, 150], atol=6)  # frames 0, 5, 10 and 15


def test_seven_seconds_at_one_and_a_half_frames_give_fractional_positions() -> None:
    actual = clip(mp4(frames=56, rate=8), fps=1.5)  # 10.5 frames, 10 taken
    assert actual.fps == pytest.approx(10 / 7)
    assert actual.grid.pair_ticks == pytest.approx(2 * 0.7 * 13)


def test_max_frames_bounds_a_video() -> None:
    assert clip(mp4(frames=40, rate=10), fps=10, most=7).grid.pairs == 3


def test_a_single_frame_is_repeated() -> None:
    actual = clip(mp4(frames=1))
    pair = actual.patches.reshape(-1, 3, 2, 256)
    assert actual.grid.pairs == 1
    assert np.array_equal(pair[:, :, 0], pair[:, :, 1])


def test_broken_videos_are_refused() -> None:
    with pytest.raises(BadMedia):
        clip(mp4()[:200])
    with pytest.raises(BadMedia):
        clip(pcm(0.5))


# -- sounds ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000))
def test_sound_tokens_are_those_of_transformers(prompts: Any, frames: int) -> None:
    assert sound_tokens(frames, AudioSizes()) == prompts._get_feat_extract_output_lengths(frames)


@pytest.mark.parametrize("samples", [400, 16_000, 16_159, 23_456])
def test_mel_frames_are_those_of_transformers(samples: int) -> None:
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    actual = extractor(
        np.zeros(samples, np.float32),
        sampling_rate=RATE,
        padding=True,
        truncation=False,
        return_attention_mask=True,
        return_tensors="np",
    )
    assert mel_frames(samples) == actual["attention_mask"].sum() == actual["input_features"].shape[-1]


@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (8000, 1), (44_100, 2), (48_000, 2), (22_050, 1)])
def test_any_rate_and_channel_count_becomes_16_khz_mono(rate: int, channels: int) -> None:
    actual = read_samples(pcm(1.0, rate, channels), MediaLimits())
    assert actual.shape == (1, pytest.approx(16_000, abs=2))
    assert actual.dtype == np.float32
    expected = 8000 / 32768 * np.sin(2 * math.pi * 440 * np.arange(actual.shape[1]) / RATE)
    assert np.abs(actual[0] - expected)[800:-800].max() < 2e-3


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_a_sound_without_enough_samples_is_refused(seconds: float) -> None:
    with pytest.raises(BadMedia, match="samples at 16000 Hz"):
        read_samples(pcm(seconds), MediaLimits())


@given(
    st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1.0, 0.5, 2 / 1.5]), st.integers(1, 90)
)
def test_a_video_and_its_sound_are_merged_as_transformers_does(
    prompts: Any, pairs: int, rows: int, columns: int, seconds: float, sounds: int
) -> None:
    holder = type(
        "P",
        (),
        {
            "audio_bos_token": "<",
            "audio_eos_token": ">",
            "video_token": "v",
            "audio_token": "a",
            "video_processor": type("V", (), {"merge_size": 2})(),
        },
    )()
    expected = prompts.Qwen3OmniMoeProcessor.replace_video_with_audio_token(
        holder,
        {"video_grid_thw": [np.array([pairs, 2 * rows, 2 * columns])], "video_second_per_grid": [seconds]},
        0,
        {"num_audio_tokens": [sounds]},
        0,
        position_id_per_seconds=13.0,
    )
    is_sound = interleave(Grid(pairs=pairs, rows=rows, columns=columns, pair_ticks=seconds * 13.0), sounds)
    assert "<" + "".join("a" if heard else "v" for heard in is_sound) + ">" == expected
