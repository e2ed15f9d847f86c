"""Log-mel spectrograms equal the reference feature extractor, alone and in batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_core.families.mel import LogMel
from mstar_core.families.mel_tables import frames_of, hertz, mel_filters, mels

LENGTHS = (48_321, 16_000, 5_000, 401, 160, 159, 0)
FLOAT32 = 2e-5
REFERENCE = 1e-4
"""The reference computes its DFT in float32."""


def drawn(*shape: int, seed: int) -> Tensor:
    """Normal numbers of a shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def clip(samples: int) -> Tensor:
    """A tone that rises, with noise, and a silent end."""
    time = torch.arange(samples) / 16_000
    wave = 0.3 * torch.sin(2 * math.pi * (200 + 900 * time) * time) + 0.01 * drawn(samples, seed=samples)
    return wave * (time < 0.8 * samples / 16_000)


def plain(samples: Tensor, bins: int) -> np.ndarray:
    """The same by NumPy's padding and FFT, one clip at a time: [frames, bins]."""
    padded = np.pad(samples.double().numpy(), 200, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    frames = [padded[start : start + 400] * window for start in range(0, len(padded) - 399, 160)][:-1]
    power = np.abs(np.fft.rfft(np.array(frames), axis=1)) ** 2
    found = np.log10(np.maximum(power @ mel_filters(bins), 1e-10))
    return np.asarray((np.maximum(found, found.max() - 8.0) + 4.0) / 4.0)


@pytest.mark.parametrize("samples", [each for each in LENGTHS if each >= 160])
def test_a_clip_equals_the_plain_computation(samples: int) -> None:
    mel = LogMel(128)([clip(samples)])[0]
    expected = torch.from_numpy(plain(clip(samples), 128)).float()
    assert mel.shape == (frames_of(samples), 128)
    torch.testing.assert_close(mel, expected, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("samples", [each for each in LENGTHS if each > 400])
def test_a_clip_equals_the_reference_feature_extractor(samples: int) -> None:
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    inputs = extractor(clip(samples).numpy(), sampling_rate=16_000, padding=True, truncation=False, return_tensors="pt")
    expected = inputs["input_features"][0].T[: frames_of(samples)]
    torch.testing.assert_close(LogMel(128)([clip(samples)])[0], expected, atol=REFERENCE, rtol=0)


def test_the_filters_are_those_of_the_reference() -> None:
    audio_utils = pytest.importorskip("transformers.audio_utils")
    expected = audio_utils.mel_filter_bank(201, 128, 0.0, 8000.0, 16_000, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(mel_filters(128), expected, atol=1e-9)


def test_the_mel_scale_and_its_inverse_agree() -> None:
    scale = np.array([0.0, 440.0, 999.0, 1000.0, 1001.0, 8000.0])
    np.testing.assert_allclose(hertz(mels(scale)), scale, atol=1e-9)


def test_clips_of_any_batch_equal_clips_alone() -> None:
    module, clips = LogMel(128), [clip(samples) for samples in LENGTHS]
    together = module(clips)
    assert together.shape == (len(clips), frames_of(max(LENGTHS)), 128)
    for own, samples in zip(together, clips, strict=True):
        assert torch.equal(own[: frames_of(len(samples))], module([samples])[0])
        assert not own[frames_of(len(samples)) :].any()


def test_one_pass_over_unequal_clips_equals_clips_alone() -> None:
    module, clips = LogMel(128), [clip(samples) for samples in LENGTHS]
    torch.testing.assert_close(module._spectra(clips), module(clips), atol=1e-6, rtol=0)
