"""Code2Wav's decoder for CUDA: its weights in the kernels' layout, and the sequence of kernels.

Created by the node. A block has one kernel for its upsampling and two per residual unit; channels last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from mstar_qwen3omni.vocoder import kernels
from mstar_qwen3omni.vocoder.decoder import TINY, CausalConv, DecoderBlock, ResidualUnit, SnakeBeta, TransposedConv

if TYPE_CHECKING:
    from torch import Tensor, nn

OUTPUT_BLOCK: Final = 64
FEW_STEPS: Final = 2048
"""Steps of all windows below which a GEMM uses smaller tiles, to fill the device."""


@dataclass(frozen=True, slots=True)
class Snake:
    """Slope and height of a SnakeBeta per output column: float32 [columns]."""

    slope: Tensor
    height: Tensor

    @classmethod
    def of(cls, snake: nn.Module, repeats: int = 1) -> Snake:
        assert isinstance(snake, SnakeBeta)
        alpha, beta = snake.alpha.detach().float(), snake.beta.detach().float()
        return cls(alpha.exp().repeat(repeats), (beta.exp() + TINY).reciprocal().repeat(repeats))


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution and the SnakeBeta behind it. weight: [taps, columns, inner]; bias: float32 [columns].

    Output step t reads input steps t + tap * dilation - reach; fewer: output steps that the input has more.
    """

    weight: Tensor
    bias: Tensor
    after: Snake
    reach: int = 0
    dilation: int = 1
    fewer: int = 0

    @classmethod
    def causal(cls, layer: nn.Module, after: nn.Module, dtype: torch.dtype) -> Conv:
        assert isinstance(layer, CausalConv) and layer.conv.bias is not None
        weight, bias = layer.conv.weight.detach().to(dtype), layer.conv.bias.detach()
        dilation = int(layer.conv.dilation[0])
        return cls(weight.permute(2, 0, 1).contiguous(), bias.float(), Snake.of(after), layer.reach, dilation)

    @classmethod
    def upsampling(cls, layer: nn.Module, after: nn.Module, dtype: torch.dtype) -> Conv:
        """An output step gives `rate` samples: the kernel's first half of the next input step, its second of this."""
        assert isinstance(layer, TransposedConv) and layer.conv.bias is not None
        rate, weight = layer.rate, layer.conv.weight.detach().to(dtype)
        inner, outer, length = weight.shape
        assert length == 2 * rate
        taps = weight.permute(2, 1, 0).reshape(2, rate * outer, inner).flip(0).contiguous()
        return cls(taps, layer.conv.bias.detach().float().repeat(rate), Snake.of(after, rate), fewer=1)


class FusedDecoder:
    """Decoder on its CUDA device. Copies the weights when created.

    dtype: of weights and of activations between kernels; float16 keeps eight times the precision of bfloat16 at its
    speed, and values beyond its range saturate. precision: of float32 GEMMs: `tf32x3` has the error of float32, `tf32`
    ten bits.
    """

    def __init__(self, layers: nn.ModuleList, dtype: torch.dtype, *, precision: str = "tf32x3") -> None:
        self._dtype = dtype
        self._precision = precision
        parts: list[Any] = list(layers)
        entry, *blocks, last, out = parts
        assert all(isinstance(block, DecoderBlock) for block in blocks)
        snakes = [block.block[0] for block in blocks] + [last]
        self._entry = Conv.causal(entry, snakes[0], dtype)
        self._blocks = [
            _block(list(block.block), after, dtype) for block, after in zip(blocks, snakes[1:], strict=True)
        ]
        assert isinstance(out, CausalConv) and out.conv.bias is not None
        self._taps = out.conv.weight.detach()[0].t().float().contiguous()
        self._bias = out.conv.bias.detach().float()

    def decode(self, x: Tensor, *, is_pcm: bool) -> Tensor:
        """Decode [B, steps, width]: samples [B, S] in [-1, 1], float32, or int16 as PCM."""
        most = torch.finfo(self._dtype).max
        bent = self._convolve(self._entry, x.clamp(-most, most).to(self._dtype).contiguous())[1]
        for up, units in self._blocks:
            wide, bent = self._convolve(up, bent, keeps_wide=True)
            rate = up.weight.shape[1] // units[0][0].weight.shape[2]
            wide, bent = (part.view(len(x), part.shape[1] * rate, -1) for part in (wide, bent))
            for index, (first, second) in enumerate(units):
                inner = self._convolve(first, bent)[1]
                wide, bent = self._convolve(second, inner, wide, keeps_wide=index + 1 < len(units))
        return self._samples(bent, is_pcm)

    def _convolve(
        self, conv: Conv, x: Tensor, residual: Tensor | None = None, *, keeps_wide: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the result and its SnakeBeta, [B, made, columns] each. If it is not kept, the first is the second."""
        batch, taken, inner = x.shape
        taps, columns, _ = conv.weight.shape
        outputs = taken - conv.fewer
        bent = torch.empty((batch, outputs, columns), dtype=x.dtype, device=x.device)
        wide = torch.empty_like(bent) if keeps_wide else bent
        cut = _tile(batch * outputs, columns, inner, is_wide=x.dtype == torch.float32)
        tiles = math.ceil(outputs / cut["bm"])
        kernels.conv_kernel[(batch * tiles, math.ceil(columns / cut["bn"]))](
            x,
            conv.weight,
            conv.bias,
            bent if residual is None else residual,
            conv.after.slope,
            conv.after.height,
            wide,
            bent,
            taken,
            outputs,
            tiles,
            conv.reach,
            conv.dilation,
            inner=inner,
            outer=columns,
            taps=taps,
            has_residual=residual is not None,
            keeps_wide=keeps_wide,
            precision=self._precision,
            **cut,
        )
        return wide, bent

    def _samples(self, bent: Tensor, is_pcm: bool) -> Tensor:
        batch, steps, channels = bent.shape
        taps = self._taps.shape[0]
        out = torch.empty((batch, steps), dtype=torch.int16 if is_pcm else torch.float32, device=bent.device)
        kernels.output_kernel[(batch, math.ceil(steps / OUTPUT_BLOCK))](
            bent,
            self._taps,
            self._bias,
            out,
            steps,
            channels=channels,
            padded=_power(channels),
            taps=taps,
            is_pcm=is_pcm,
            block=OUTPUT_BLOCK,
        )
        return out


Units = list[tuple[Conv, Conv]]


def _block(parts: list[Any], after: nn.Module, dtype: torch.dtype) -> tuple[Conv, Units]:
    """Return a block's upsampling and residual units. after: the SnakeBeta behind the block."""
    units = [unit for unit in parts[2:] if isinstance(unit, ResidualUnit)]
    behind = [unit.act1 for unit in units[1:]] + [after]
    pairs = [
        (Conv.causal(unit.conv1, unit.act2, dtype), Conv.causal(unit.conv2, following, dtype))
        for unit, following in zip(units, behind, strict=True)
    ]
    return Conv.upsampling(parts[1], units[0].act1, dtype), pairs


def _tile(steps: int, columns: int, inner: int, *, is_wide: bool) -> dict[str, int]:
    """Return tile sizes and launch options of a GEMM. `bk`, which orders the sums, does not depend on the batch."""
    bm = 64 if steps < FEW_STEPS or is_wide else 128
    bn = 64 if columns % 128 and columns > 128 or is_wide else min(128, max(16, _power(columns)))
    bk = min(32 if is_wide or inner % 64 else 64, max(16, _power(inner)))
    return {"bm": bm, "bn": bn, "bk": bk, "num_warps": 8 if bm * bn > 64 * 128 else 4, "num_stages": 3}


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
