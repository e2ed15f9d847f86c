"""The codec's decoder for CUDA: the layers from frame vectors to samples as a sequence of kernels, with their states.

Created by the node. States have the order and the layout of the layers in torch, so that both go on from each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mstar_core.layers.snake_conv import FusedConv, FusedOutput, convolve, samples_of
from mstar_qwen3tts.codec.fused_frames import joined
from mstar_qwen3tts.codec.kernels import carry
from mstar_qwen3tts.codec.layers import ResidualUnit

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_qwen3tts.codec.layers import States

Units = list[tuple[FusedConv, FusedConv]]


class FusedDecoder:
    """Decoder on its device. Copies the weights when created.

    dtype: of weights and of activations between kernels, whose products add up in float32. float32 has its own error;
    float16 rounds to eleven bits, as many as TF32, and values beyond its range saturate. States are float32.
    """

    def __init__(self, layers: nn.ModuleList, dtype: torch.dtype) -> None:
        self._dtype = dtype
        parts: list[Any] = list(layers)
        entry, *blocks, last, out = parts
        snakes = [block.block[0] for block in blocks] + [last]
        self._entry = FusedConv.causal(entry.conv, snakes[0], dtype)
        afters = zip(blocks, snakes[1:], strict=True)
        self._blocks = [_block(list(block.block), after, dtype) for block, after in afters]
        self._out = FusedOutput.of(out.conv)

    def decode(self, x: Tensor, states: States) -> Tensor:
        """Decode new steps: samples [B, S] in [-1, 1], float32. x: [B, steps, width]."""
        x = joined(x, self._entry.reach, states).to(self._dtype)
        bent = self._through(self._entry, x, states, room=1)[1]
        for index, (up, units) in enumerate(self._blocks):
            rate = up.weight.shape[1] // units[0][0].weight.shape[2]
            # Without the step before the new ones, an upsampling has no second half of its first samples.
            wide, bent = self._through(up, bent, states, room=units[0][0].reach, rate=rate, keeps_wide=True)
            is_last = index + 1 == len(self._blocks)
            rooms = [*(first.reach for first, _ in units[1:]), len(self._out.weight) - 1 if is_last else 1]
            for (first, second), room in zip(units, rooms, strict=True):
                is_kept = second is not units[-1][1]
                inner = self._through(first, bent, states)[1]
                wide, bent = self._through(second, inner, states, wide, room=room, keeps_wide=is_kept)
        return samples_of(self._out, bent, is_pcm=False)[:, len(self._out.weight) - 1 :]

    def _through(
        self,
        conv: FusedConv,
        x: Tensor,
        states: States,
        residual: Tensor | None = None,
        *,
        room: int = 0,
        rate: int = 1,
        keeps_wide: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return a convolution, [B, made, channels], and its SnakeBeta behind `room` earlier steps of the next state.

        x: [B, taken, inner], with the steps before the new ones.
        """
        columns, outputs = conv.weight.shape[1], x.shape[1] - conv.fewer - conv.reach
        bent = x.new_empty(len(x), room + outputs * rate, columns // rate)
        into = bent[:, room:].view(len(x), outputs, columns)
        wide, _ = convolve(conv, x, residual, keeps_wide=keeps_wide, has_past=True, into=into)
        if room:
            carry(bent, room, states.exchange(bent.shape[2] * room))
        return (wide.view(len(x), outputs * rate, -1) if keeps_wide else bent), bent


def _block(parts: list[Any], after: nn.Module, dtype: torch.dtype) -> tuple[FusedConv, Units]:
    """Return a block's upsampling and residual units. after: the SnakeBeta behind the block."""
    units = [unit for unit in parts[2:] if isinstance(unit, ResidualUnit)]
    behind = [unit.act1 for unit in units[1:]] + [after]
    pairs = [
        (FusedConv.causal(unit.conv1.conv, unit.act2, dtype), FusedConv.causal(unit.conv2.conv, following, dtype))
        for unit, following in zip(units, behind, strict=True)
    ]
    return FusedConv.upsampling(parts[1].conv, units[0].act1, dtype), pairs
