"""Codes of sounds by residual k-means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from scripts.training.codes import codes_of, load_codes, quantized, save_codes

FRAME = 1920


def test_codes_tell_frames_apart() -> None:
    values = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    codes = quantized(values, 4, 16, 1)
    assert codes.shape == (40, 4) and codes.max() < 16
    assert len({tuple(each) for each in codes.tolist()}) == len(values)


def test_sounds_have_codes_for_each_frame_that_a_file_keeps(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    sounds = {
        (name, word): chance.normal(0, 3000, frames * FRAME).astype(np.int16)
        for name, word, frames in (("ryan", "one", 3), ("vivian", "two", 5))
    }
    codes = codes_of(sounds, FRAME, 2, 4, 0)
    assert {key: each.shape for key, each in codes.items()} == {("ryan", "one"): (3, 2), ("vivian", "two"): (5, 2)}
    save_codes(codes, tmp_path / "codes.npz")
    read = load_codes(tmp_path / "codes.npz")
    assert list(read) == list(codes) and all((read[key] == codes[key]).all() for key in codes)
