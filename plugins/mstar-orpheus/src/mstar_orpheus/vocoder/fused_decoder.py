"""SNAC decoder for CUDA: the weights of `snac.Snac` in the kernels' layout, and the sequence of kernels.

Created by the vocoder node. A block has five kernels: upsampling, noise, and one per residual unit; channels last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from mstar_orpheus.checkpoint.config import IDS_PER_FRAME, VQ_STRIDES
from mstar_orpheus.vocoder import kernels
from mstar_orpheus.vocoder.noise import CODEC_SALT, SEEDED
from mstar_orpheus.vocoder.snac import needed
from mstar_orpheus.vocoder.tiling import PRECISION, Tile, tile

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_orpheus.vocoder.snac import Codebook, ResidualUnit, Snac, SnacBlock, Snake

DILATIONS: Final = (1, 3, 9)
NOISE_BLOCK: Final = 1024
OUTPUT_BLOCK: Final = 64
LATENT_BLOCK: Final = 256
_TF32_ROUND: Final = 0x1000


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Split a float32 tensor into a sum of two TF32 tensors, the first rounded to nearest."""
    high = _rounded(weight)
    return high, _rounded(weight - high)


def _rounded(value: Tensor) -> Tensor:
    return ((value.contiguous().view(torch.int32) + _TF32_ROUND) & -2 * _TF32_ROUND).view(torch.float32)


@dataclass(frozen=True, slots=True)
class Slopes:
    """Alpha of a snake and its inverse, [channels] each."""

    slope: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, snake: Snake) -> Slopes:
        slope = snake.alpha.detach().flatten().contiguous()
        return cls(slope, 1.0 / (slope + 1e-9))


@dataclass(frozen=True, slots=True)
class GemmWeight:
    """Weight [columns, inner] in two TF32 halves (without split, the second is unused), and its bias."""

    high: Tensor
    low: Tensor
    bias: Tensor
    columns: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, precision: str) -> GemmWeight:
        weight = weight.detach().contiguous()
        high, low = split(weight) if precision == "split" else (weight, weight)
        outer = weight.shape[0] if bias is None else bias.numel()
        biases = torch.zeros(outer, device=weight.device) if bias is None else bias.detach()
        return cls(high, low, biases, weight.shape[0])


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights of a residual unit: depthwise taps [7, channels], their snake, the GEMM, and the next layer's snake."""

    taps: Tensor
    tap_bias: Tensor
    inner: Slopes
    product: GemmWeight
    after: Slopes
    dilation: int


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of a decoder block. The layer before it applies its first snake."""

    rate: int
    inner: int
    outer: int
    up: GemmWeight
    noisy: GemmWeight
    first: Slopes
    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Steps of a block's input that a decode needs (from `low`, `count` of `length`), and the start of its output."""

    low: int
    count: int
    length: int
    start: int


class FusedDecoder:
    """Decoder of one SNAC on its CUDA device. Copies the weights when created.

    precision: of the GEMMs, see `tiling.PRECISION`. tiles: function that gives their tiles.
    """

    def __init__(
        self, snac: Snac, offset: int, *, precision: str = PRECISION, tiles: Callable[[str, int, int], Tile] = tile
    ) -> None:
        self.config = snac.config
        self._offset = offset
        self._precision = precision
        self._tile = tiles
        books: list[Any] = list(snac.quantizer.quantizers)
        self._tables = torch.stack([_table(book) for book in books])
        layers: list[Any] = list(snac.decoder.model)
        entry, mixing, blocks, snake, output = layers[0], layers[1], layers[2:-2], layers[-2], layers[-1]
        self._entry_taps, self._entry_bias = _taps(entry), entry.bias.detach()
        self._mixing = GemmWeight.of(mixing.weight[:, :, 0], mixing.bias, precision)
        self._mixed = Slopes.of(blocks[0].block[0])
        after = [block.block[0] for block in blocks[1:]] + [snake]
        self._blocks = [
            _block(block, rate, Slopes.of(snake), precision)
            for block, rate, snake in zip(blocks, self.config.rates, after, strict=True)
        ]
        self._output_taps, self._output_bias = _taps_of_output(output), output.bias.detach()
        self._noise_spans: dict[tuple[int, tuple[int, int]], tuple[Tensor, list[int]]] = {}

    def spans(self, frames: int, keep: tuple[int, int]) -> list[Span]:
        """Return the span of each block for the samples `keep` of `frames` frames."""
        steps = frames * max(VQ_STRIDES)
        spans, start, length = [], 0, steps
        for (low, high), rate in zip(needed(keep, self.config.rates, steps), self.config.rates, strict=True):
            spans.append(Span(low - start, high - low, length, low * rate))
            start, length = low * rate, (high - low) * rate
        return spans

    def decode(
        self, window: Tensor, noise: Sequence[Tensor] | None, keep: tuple[int, int], *, is_pcm: bool = False
    ) -> Tensor:
        """Decode samples `keep` of each window: float32 or, as PCM, int16 [B, keep].

        window: int64 [B, 7 * frames] audio ids. noise: one float32 [B, count * rate] per block, for the steps of its
        span; None for no noise.
        """
        batch, frames = window.shape[0], window.shape[1] // IDS_PER_FRAME
        spans = self.spans(frames, keep)
        bent = self._begin(window, batch, frames)
        for index, (block, span) in enumerate(zip(self._blocks, spans, strict=True)):
            bent = self._run_block(block, span, bent, batch, None if noise is None else noise[index])
        length = spans[-1].count * self._blocks[-1].rate
        count, channels = keep[1] - keep[0], self._blocks[-1].outer
        out = torch.empty((batch, count), dtype=torch.int16 if is_pcm else torch.float32, device=window.device)
        kernels.output_kernel[(batch, _tiles(count, OUTPUT_BLOCK))](
            bent,
            self._output_taps,
            self._output_bias,
            out,
            length,
            keep[0] - spans[-1].start,
            count,
            channels=channels,
            padded=_power(channels),
            is_pcm=is_pcm,
            block=OUTPUT_BLOCK,
        )
        return out

    def cut_noise(self, noise: Sequence[Tensor], frames: int, keep: tuple[int, int]) -> list[Tensor]:
        """Cut full noise, float32 [B, 1, length] per block, to the spans that `decode` needs."""
        pairs = zip(noise, self._noise_places(frames, keep), strict=True)
        return [whole[:, 0, first : first + count].contiguous() for whole, (first, count) in pairs]

    def seeded_noise(self, noise_params: Tensor, frames: int, keep: tuple[int, int]) -> list[Tensor]:
        """Return noise of each window's seed and position, zeros for other modes. noise_params: int64 [3, B]."""
        batch = noise_params.shape[1]
        places = self._noise_places(frames, keep)
        spans = self._spans_on_device(frames, keep, places)
        counts = [count for _, count in places]
        out = torch.empty(batch * sum(counts), device=noise_params.device)
        kernels.noise_kernel[(batch, _tiles(max(counts), NOISE_BLOCK), len(places))](
            noise_params, spans, out, batch, CODEC_SALT, len(places), seeded_mode=SEEDED, block=NOISE_BLOCK
        )
        return list(out.split([batch * count for count in counts]))

    def _noise_places(self, frames: int, keep: tuple[int, int]) -> list[tuple[int, int]]:
        spans = self.spans(frames, keep)
        return [(span.start, span.count * block.rate) for block, span in zip(self._blocks, spans, strict=True)]

    def _spans_on_device(self, frames: int, keep: tuple[int, int], places: list[tuple[int, int]]) -> Tensor:
        spans = self._noise_spans.get((frames, keep))
        if spans is None:
            before = [sum(count for _, count in places[:index]) for index in range(len(places))]
            rows = [[first, count, ahead] for (first, count), ahead in zip(places, before, strict=True)]
            table = torch.tensor(rows, dtype=torch.int64, device=self._tables.device)
            spans = self._noise_spans[frames, keep] = (table, before)
        return spans[0]

    # -- layers --------------------------------------------------------------------------------------------------

    def _begin(self, window: Tensor, batch: int, frames: int) -> Tensor:
        steps, width = frames * max(VQ_STRIDES), self.config.latent
        latent = torch.empty((batch * steps, width), device=window.device)
        kernels.latent_kernel[(batch, steps, _tiles(width, LATENT_BLOCK))](
            window,
            self._tables,
            self._entry_taps,
            self._entry_bias,
            latent,
            self._offset,
            self.config.codebook_size,
            width=width,
            steps=steps,
            slots=window.shape[1],
            block=LATENT_BLOCK,
        )
        return self._pointwise(latent, self._mixing, self._mixed, None)[1]

    def _run_block(self, block: Block, span: Span, bent: Tensor, batch: int, noise: Tensor | None) -> Tensor:
        length = span.count * block.rate
        wide = torch.empty((batch * length, block.outer), device=bent.device)
        other = torch.empty_like(wide)
        self._upsample(block, span, bent, batch, wide, other, is_bent=noise is None)
        if noise is not None:
            wide, other = self._pointwise(wide, block.noisy, block.first, noise)
        bent, other = other, torch.empty_like(wide)
        for index, unit in enumerate(block.units):
            self._unit(unit, bent, wide, other, batch, length, is_kept=index + 1 < len(block.units))
            bent, other = other, bent
        return bent

    def _pointwise(self, x: Tensor, product: GemmWeight, after: Slopes, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, inner = x.shape
        bent = torch.empty((rows, product.columns), device=x.device)
        wide = bent if noise is None else torch.empty_like(bent)
        cut = self._tile("pointwise", rows, product.columns)
        kernels.pointwise_kernel[(_tiles(rows, cut.bm), _tiles(product.columns, cut.bn))](
            x,
            product.high,
            product.low,
            product.bias,
            product.bias if noise is None else noise,
            after.slope,
            after.inverse,
            wide,
            bent,
            rows,
            inner,
            product.columns,
            is_noisy=noise is not None,
            precision=self._precision,
            **cut.launch,
        )
        return wide, bent

    def _upsample(
        self, block: Block, span: Span, x: Tensor, batch: int, out: Tensor, bent: Tensor, *, is_bent: bool
    ) -> None:
        taken, columns = batch * (span.count + 1), block.rate * block.outer
        cut = self._tile("upsample", taken, columns)
        kernels.upsample_kernel[(_tiles(taken, cut.bm), _tiles(columns, cut.bn))](
            x,
            block.up.high,
            block.up.low,
            block.up.bias,
            block.first.slope,
            block.first.inverse,
            out,
            bent,
            taken,
            span.low,
            span.count,
            span.length,
            block.rate,
            block.inner,
            block.outer,
            is_bent=is_bent,
            precision=self._precision,
            **cut.launch,
        )

    def _unit(
        self, unit: Unit, bent: Tensor, wide: Tensor, out: Tensor, batch: int, length: int, *, is_kept: bool
    ) -> None:
        channels = unit.product.columns
        cut = self._tile("unit", batch * length, channels)
        kernels.unit_kernel[(batch * _tiles(length, cut.bm), _tiles(channels, cut.bn))](
            bent,
            wide,
            unit.taps,
            unit.tap_bias,
            unit.inner.slope,
            unit.inner.inverse,
            unit.product.high,
            unit.product.low,
            unit.product.bias,
            unit.after.slope,
            unit.after.inverse,
            out,
            length,
            unit.dilation,
            int(is_kept),
            channels,
            precision=self._precision,
            **cut.launch,
        )


def _block(block: SnacBlock, rate: int, after: Slopes, precision: str) -> Block:
    parts: list[Any] = list(block.block)
    up, noisy, units = parts[1], parts[2], parts[3:]
    fused_units = []
    for index, unit in enumerate(units):
        following = after if index + 1 == len(units) else Slopes.of(units[index + 1].block[0])
        fused_units.append(_unit(unit, DILATIONS[index], following, precision))
    inner, outer, _ = up.weight.shape
    # [inner, outer, 2 * rate] -> one row per output of a step: taps of this step, then of the previous one.
    halves = up.weight.detach().reshape(inner, outer, 2, rate).permute(3, 1, 2, 0)
    return Block(
        rate,
        inner,
        outer,
        GemmWeight.of(halves.reshape(rate * outer, 2 * inner), up.bias, precision),
        GemmWeight.of(noisy.linear.weight[:, :, 0], None, precision),
        Slopes.of(units[0].block[0]),
        tuple(fused_units),
    )


def _unit(unit: ResidualUnit, dilation: int, after: Slopes, precision: str) -> Unit:
    parts: list[Any] = list(unit.block)
    depthwise, snake, pointwise = parts[1:]
    product = GemmWeight.of(pointwise.weight[:, :, 0], pointwise.bias, precision)
    return Unit(_taps(depthwise), depthwise.bias.detach(), Slopes.of(snake), product, after, dilation)


def _table(book: Codebook) -> Tensor:
    """Return the latent of each code: float32 [codes, latent], computed in float64."""
    out: Any = book.out_proj
    projected: Tensor = book.codebook.weight.double() @ out.weight[:, :, 0].double().T + out.bias.double()
    return projected.float()


def _taps(depthwise: nn.Module) -> Tensor:
    assert isinstance(depthwise, nn.Conv1d)
    return depthwise.weight.detach()[:, 0].T.contiguous()


def _taps_of_output(output: nn.Module) -> Tensor:
    assert isinstance(output, nn.Conv1d)
    return output.weight.detach()[0].T.contiguous()


def _tiles(count: int, block: int) -> int:
    return math.ceil(count / block)


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
