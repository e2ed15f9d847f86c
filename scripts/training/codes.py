"""Codes of short sounds by residual k-means of their mel spectra: the encoder of a miniature's codec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from scripts.training.spectra import log_mel

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from scripts.training.espeak import Pcm

    Codes = npt.NDArray[np.int64]

ROUNDS: Final = 30


def features(pcm: Pcm, frame: int) -> Tensor:
    """Return what is quantized, float32 [frames, values]: eight columns of the log-mel spectrum of each frame.

    frame: samples of a frame, a multiple of 240.
    """
    samples = torch.from_numpy(pcm.astype(np.float32) / 32768)[None]
    mel = log_mel(samples, 512, 240, 32)[0, :, : len(pcm) // 240]
    return mel.t().reshape(len(pcm) // frame, -1)


def quantized(values: Tensor, groups: int, codebook: int, seed: int) -> Tensor:
    """Quantize vectors by residual k-means: int64 [n, groups]. values: [n, width]. codebook: codes of a group."""
    chance = torch.Generator().manual_seed(seed)
    rest, found = values.clone(), []
    for _ in range(groups):
        centres = rest[torch.randperm(len(rest), generator=chance)[:codebook]]
        for _ in range(ROUNDS):
            nearest = torch.cdist(rest, centres).argmin(1)
            for index in nearest.unique().tolist():
                centres[index] = rest[nearest == index].mean(0)
        nearest = torch.cdist(rest, centres).argmin(1)
        rest = rest - centres[nearest]
        found.append(nearest)
    return torch.stack(found, dim=1)


def codes_of(
    sounds: Mapping[tuple[str, str], Pcm], frame: int, groups: int, codebook: int, seed: int
) -> dict[tuple[str, str], Codes]:
    """Return the codes of each sound: int64 [frames, groups]. See `features` and `quantized`."""
    parts = [features(pcm, frame) for pcm in sounds.values()]
    split = quantized(torch.cat(parts), groups, codebook, seed).split([len(part) for part in parts])
    return {key: codes.numpy() for key, codes in zip(sounds, split, strict=True)}


def save_codes(codes: Mapping[tuple[str, str], Codes], path: Path) -> None:
    """Write the codes of all sounds."""
    np.savez(path, **{"/".join(key): each for key, each in codes.items()})  # type: ignore[arg-type]


def load_codes(path: Path) -> dict[tuple[str, str], Codes]:
    """Read the codes of all sounds, by speaker and word."""
    with np.load(path) as found:
        return {(name.split("/")[0], name.split("/")[1]): found[name] for name in found.files}
