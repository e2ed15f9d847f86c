"""Noise of the vocoder's noise blocks: off, seeded per request and window, or from torch's global generator.

Seeded noise is a function of (seed, window, block) alone, so it does not depend on the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from mstar_core.layers import rng
from mstar_orpheus.checkpoint.config import NOISE_MODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

OFF: Final = NOISE_MODES.index("off")
SEEDED: Final = NOISE_MODES.index("seeded")
GLOBAL: Final = NOISE_MODES.index("global")
CODEC_SALT: Final = 0x736E6163  # separates these draws from the sampler's, which use the same seed


def window_noise(
    modes: Tensor, seeds: Tensor, windows: Tensor, lengths: Sequence[int], *, has_global: bool = True
) -> list[Tensor]:
    """Return the noise of all blocks for a batch of windows: one float32 [B, 1, length] per block, in block order.

    modes (indices into NOISE_MODES), seeds, windows: int64 [B]. has_global: some row may have the mode GLOBAL.
    """
    draws = enumerate(lengths)
    return [_block_noise(modes, seeds, windows * len(lengths) + block, length, has_global) for block, length in draws]


def _block_noise(modes: Tensor, seeds: Tensor, counters: Tensor, length: int, has_global: bool) -> Tensor:
    mode = modes[:, None]
    seeded = rng.normal(seeds + CODEC_SALT, counters, length)
    if not has_global:
        return torch.where(mode == SEEDED, seeded, 0.0).unsqueeze(1)
    shared = torch.randn(seeded.shape, device=seeded.device)
    return torch.where(mode == SEEDED, seeded, torch.where(mode == GLOBAL, shared, 0.0)).unsqueeze(1)
