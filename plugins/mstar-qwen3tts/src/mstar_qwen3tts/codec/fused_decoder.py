"""The codec's decoder for CUDA: the layers from frame vectors to samples as a sequence of kernels, with their states.

Created by the node. States have the order and the layout of the layers in torch, so that both go on from each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mstar_core.layers.snake_conv import FusedConv, FusedOutput, convolve, samples_of
from mstar_qwen3tts.codec.layers import ResidualUnit

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_qwen3tts.codec.layers import States

Units = list[tuple[FusedConv, FusedConv]]


class FusedDecoder:
    """Decoder on its device, in float32. Copies the weights when created.

    precision: of GEMMs: `tf32x3` has the error of float32, `tf32` ten bits.
    """

    def __init__(self, layers: nn.ModuleList, precision: str) -> None:
        self._precision = precision
        parts: list[Any] = list(layers)
        entry, *blocks, last, out = parts
        snakes = [block.block[0] for block in blocks] + [last]
        self._entry = FusedConv.causal(entry.conv, snakes[0], torch.float32)
        self._blocks = [_block(list(block.block), after) for block, after in zip(blocks, snakes[1:], strict=True)]
        self._out = FusedOutput.of(out.conv)

    def decode(self, x: Tensor, states: States) -> Tensor:
        """Decode new steps: samples [B, S] in [-1, 1], float32. x: [B, steps, width]."""
        precision = self._precision
        bent = convolve(self._entry, _joined(states, x, self._entry.reach), has_past=True, precision=precision)[1]
        for up, units in self._blocks:
            # Without the step before the new ones, an upsampling has no second half of its first samples.
            wide, bent = convolve(up, _joined(states, bent, 1), keeps_wide=True, precision=precision)
            rate = up.weight.shape[1] // units[0][0].weight.shape[2]
            wide, bent = (part.view(len(x), part.shape[1] * rate, -1) for part in (wide, bent))
            for index, (first, second) in enumerate(units):
                inner = convolve(first, _joined(states, bent, first.reach), has_past=True, precision=precision)[1]
                wide, bent = convolve(second, inner, wide, keeps_wide=index + 1 < len(units), precision=precision)
        past = len(self._out.weight) - 1
        return samples_of(self._out, _joined(states, bent, past), is_pcm=False)[:, past:]


def _joined(states: States, x: Tensor, reach: int) -> Tensor:
    """Return x behind its last `reach` steps, which it replaces in the state. x: [B, steps, channels]."""
    before = states.take(x.shape[2], reach).transpose(1, 2).to(x.dtype)
    joined = torch.cat([before, x], dim=1).contiguous()
    states.give(joined[:, joined.shape[1] - reach :].transpose(1, 2))
    return joined


def _block(parts: list[Any], after: nn.Module) -> tuple[FusedConv, Units]:
    """Return a block's upsampling and residual units. after: the SnakeBeta behind the block."""
    units = [unit for unit in parts[2:] if isinstance(unit, ResidualUnit)]
    behind = [unit.act1 for unit in units[1:]] + [after]
    kind = torch.float32
    pairs = [
        (FusedConv.causal(unit.conv1.conv, unit.act2, kind), FusedConv.causal(unit.conv2.conv, following, kind))
        for unit, following in zip(units, behind, strict=True)
    ]
    return FusedConv.upsampling(parts[1].conv, units[0].act1, kind), pairs
