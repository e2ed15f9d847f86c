"""Convolutions with SnakeBeta between them, as decoders of sound have them, and their sequence of kernels on CUDA.

Kernels work channels last, [windows, steps, channels]: one launch computes a convolution with bias, residual and the
next SnakeBeta. Modules of plugins compute the same in torch elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

TINY: Final = 1e-9
"""Added to the divisor of SnakeBeta."""

PRECISION: Final = "tf32x3"
"""Of float32 GEMMs: three products of TF32, which have the error of float32."""

OUTPUT_BLOCK: Final = 64
FEW_STEPS: Final = 2048
"""Steps of all windows below which a GEMM uses smaller tiles, to fill the device."""

FEW_PROGRAMS: Final = 64
"""Programs of a GEMM below which its tiles have fewer columns: half the multiprocessors of an H200."""


class SnakeBeta(nn.Module):
    """x + sin(x * exp(alpha))^2 / (exp(beta) + 1e-9), per channel. x: [B, channels, T]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape."""
        slope, height = self.alpha.exp()[:, None], (self.beta.exp() + TINY).reciprocal()[:, None]
        return x + (x * slope).sin().square() * height


@dataclass(frozen=True, slots=True)
class FusedSnake:
    """Slope and height of a SnakeBeta per output column: float32 [columns]."""

    slope: Tensor
    height: Tensor

    @classmethod
    def of(cls, snake: nn.Module, repeats: int = 1) -> Self:
        """Copy the parameters, repeated for each sample that a column stands for."""
        assert isinstance(snake, SnakeBeta)
        alpha, beta = snake.alpha.detach().float(), snake.beta.detach().float()
        return cls(alpha.exp().repeat(repeats), (beta.exp() + TINY).reciprocal().repeat(repeats))


@dataclass(frozen=True, slots=True)
class FusedConv:
    """A convolution and the SnakeBeta behind it. weight: [taps, columns, inner]; bias: float32 [columns].

    Output step t reads input steps t + tap * dilation - reach; fewer: output steps that the input has more.
    """

    weight: Tensor
    bias: Tensor
    after: FusedSnake
    reach: int = 0
    dilation: int = 1
    fewer: int = 0

    @classmethod
    def causal(cls, conv: nn.Conv1d, after: nn.Module, dtype: torch.dtype) -> Self:
        """Copy a convolution that sees earlier steps only. after: the SnakeBeta behind it."""
        assert conv.bias is not None
        weight, bias = conv.weight.detach().to(dtype), conv.bias.detach()
        dilation = int(conv.dilation[0])
        reach = (weight.shape[2] - 1) * dilation
        return cls(weight.permute(2, 0, 1).contiguous(), bias.float(), FusedSnake.of(after), reach, dilation)

    @classmethod
    def upsampling(cls, conv: nn.ConvTranspose1d, after: nn.Module, dtype: torch.dtype) -> Self:
        """Copy a transposed convolution whose kernel is twice as long as its rate. after: the SnakeBeta behind it.

        A column is a sample of a channel. An output step gives `rate` samples: the kernel's first half of the next
        input step, its second of this.
        """
        assert conv.bias is not None
        rate, weight = int(conv.stride[0]), conv.weight.detach().to(dtype)
        inner, outer, length = weight.shape
        assert length == 2 * rate
        taps = weight.permute(2, 1, 0).reshape(2, rate * outer, inner).flip(0).contiguous()
        return cls(taps, conv.bias.detach().float().repeat(rate), FusedSnake.of(after, rate), fewer=1)


@dataclass(frozen=True, slots=True)
class FusedOutput:
    """Causal convolution to one channel of samples. weight: float32 [taps, channels]; bias: float32 [1]."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, conv: nn.Conv1d) -> Self:
        """Copy a convolution."""
        assert conv.bias is not None
        return cls(conv.weight.detach()[0].t().float().contiguous(), conv.bias.detach().float())


def convolve(
    conv: FusedConv,
    x: Tensor,
    residual: Tensor | None = None,
    *,
    keeps_wide: bool = False,
    has_past: bool = False,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result and its SnakeBeta, [B, made, columns] each. If it is not kept, the first is the second.

    x: [B, taken, inner]. has_past: the first `reach` steps of x are earlier inputs, in place of zeros before them.
    residual: [B, made, columns].
    into: memory for the second result, whose windows may lie apart.
    """
    from mstar_core.layers.kernels import snake_conv as kernels  # needs triton, which comes with CUDA

    batch, taken, inner = x.shape
    taps, columns, _ = conv.weight.shape
    reach = 0 if has_past else conv.reach
    outputs = taken - conv.fewer - (conv.reach - reach)
    bent = x.new_empty((batch, outputs, columns)) if into is None else into
    wide = x.new_empty((batch, outputs, columns)) if keeps_wide else bent
    cut = _tile(batch, outputs, columns, inner, is_wide=x.dtype == torch.float32)
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
        reach,
        conv.dilation,
        bent.stride(0),
        inner=inner,
        outer=columns,
        taps=taps,
        has_residual=residual is not None,
        keeps_wide=keeps_wide,
        precision=PRECISION,
        **cut,
    )
    return wide, bent


def samples_of(output: FusedOutput, bent: Tensor, *, is_pcm: bool) -> Tensor:
    """Return samples [B, steps] in [-1, 1], float32, or int16 as PCM. bent: [B, steps, channels]; zeros before them."""
    from mstar_core.layers.kernels import snake_conv as kernels  # needs triton, which comes with CUDA

    batch, steps, channels = bent.shape
    out = torch.empty((batch, steps), dtype=torch.int16 if is_pcm else torch.float32, device=bent.device)
    kernels.output_kernel[(batch, math.ceil(steps / OUTPUT_BLOCK))](
        bent,
        output.weight,
        output.bias,
        out,
        steps,
        channels=channels,
        padded=_power(channels),
        taps=output.weight.shape[0],
        is_pcm=is_pcm,
        block=OUTPUT_BLOCK,
    )
    return out


def _tile(windows: int, steps: int, columns: int, inner: int, *, is_wide: bool) -> dict[str, int]:
    """Return tile sizes and launch options of a GEMM, with more programs where few would leave the device idle.

    steps: of each window. The bits of a window do not depend on their number: `bk` does not order the sums, which
    advance in steps of one instruction.
    """
    bm = 64 if windows * steps < FEW_STEPS or is_wide else 128
    bn = 64 if columns % 128 and columns > 128 or is_wide else min(128, max(16, _power(columns)))
    bk = min(32 if is_wide or inner % 64 else 64, max(16, _power(inner)))
    if not is_wide and windows * math.ceil(steps / bm) * math.ceil(columns / bn) < FEW_PROGRAMS:
        bm, bn, bk = 64, min(bn, 32), bk if inner % 128 else 128
    return {"bm": bm, "bn": bn, "bk": bk, "num_warps": 8 if bm * bn > 64 * 128 else 4, "num_stages": 3}


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
