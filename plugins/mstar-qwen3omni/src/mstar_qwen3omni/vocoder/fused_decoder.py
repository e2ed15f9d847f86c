"""Code2Wav's decoder for CUDA: its weights in the kernels' layout, and the sequence of kernels.

Created by the node. A block has one kernel for its upsampling and two per residual unit; channels last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mstar_core.layers.snake_conv import FusedConv, FusedOutput, convolve, samples_of
from mstar_qwen3omni.vocoder.decoder import DecoderBlock, ResidualUnit

if TYPE_CHECKING:
    from torch import Tensor, nn


class FusedDecoder:
    """Decoder on its CUDA device. Copies the weights when created.

    dtype: of weights and of activations between kernels; float16 keeps eight times the precision of bfloat16 at its
    speed, and values beyond its range saturate.
    """

    def __init__(self, layers: nn.ModuleList, dtype: torch.dtype) -> None:
        self._dtype = dtype
        parts: list[Any] = list(layers)
        entry, *blocks, last, out = parts
        assert all(isinstance(block, DecoderBlock) for block in blocks)
        snakes = [block.block[0] for block in blocks] + [last]
        self._entry = FusedConv.causal(entry.conv, snakes[0], dtype)
        self._blocks = [
            _block(list(block.block), after, dtype) for block, after in zip(blocks, snakes[1:], strict=True)
        ]
        self._out = FusedOutput.of(out.conv)

    def decode(self, x: Tensor, *, is_pcm: bool) -> Tensor:
        """Decode [B, steps, width]: samples [B, S] in [-1, 1], float32, or int16 as PCM."""
        most = torch.finfo(self._dtype).max
        bent = convolve(self._entry, x.clamp(-most, most).to(self._dtype).contiguous())[1]
        for up, units in self._blocks:
            wide, bent = convolve(up, bent, keeps_wide=True)
            rate = up.weight.shape[1] // units[0][0].weight.shape[2]
            wide, bent = (part.view(len(x), part.shape[1] * rate, -1) for part in (wide, bent))
            for index, (first, second) in enumerate(units):
                inner = convolve(first, bent)[1]
                wide, bent = convolve(second, inner, wide, keeps_wide=index + 1 < len(units))
        return samples_of(self._out, bent, is_pcm=is_pcm)


Units = list[tuple[FusedConv, FusedConv]]


def _block(parts: list[Any], after: nn.Module, dtype: torch.dtype) -> tuple[FusedConv, Units]:
    """Return a block's upsampling and residual units. after: the SnakeBeta behind the block."""
    units = [unit for unit in parts[2:] if isinstance(unit, ResidualUnit)]
    behind = [unit.act1 for unit in units[1:]] + [after]
    pairs = [
        (FusedConv.causal(unit.conv1.conv, unit.act2, dtype), FusedConv.causal(unit.conv2.conv, following, dtype))
        for unit, following in zip(units, behind, strict=True)
    ]
    return FusedConv.upsampling(parts[1].conv, units[0].act1, dtype), pairs
