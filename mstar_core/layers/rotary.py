"""Rotary position embedding, half-split layout: Llama 3 frequency scaling, and positions of several axes (M-RoPE).

Used by model plugins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mstar_core.errors import ConfigError
from mstar_core.layers.linear import elementwise_kernels

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Frequency scaling by `factor`. Lengths are in tokens. Source: Llama 3.1's published configuration."""

    factor: float
    low: float
    high: float
    original_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """Parameters of a rotary embedding. width: rotated dimensions of a head (even).

    factor: positions are divided by it (linear scaling). sections: frequencies of (time, height, width), interleaved:
    see `section_axes`. Empty: one axis.
    """

    width: int
    base: float = 10000.0
    scaling: Llama3Scaling | None = None
    factor: float = 1.0
    sections: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], width: int) -> RotarySpec:
        """Read a published config: `rope_parameters`, or `rope_theta` with `rope_scaling`.

        Raises ConfigError for an unknown scaling.
        """
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        base = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return cls(width=width, base=base)
        if kind == "linear":
            return cls(width=width, base=base, factor=float(rope["factor"]))
        if kind != "llama3":
            raise ConfigError(f"unknown rope type {kind!r}", hint="use default, linear or llama3", key="rope_type")
        scaling = Llama3Scaling(
            factor=float(rope["factor"]),
            low=float(rope["low_freq_factor"]),
            high=float(rope["high_freq_factor"]),
            original_length=int(rope["original_max_position_embeddings"]),
        )
        return cls(width=width, base=base, scaling=scaling)


def frequencies(spec: RotarySpec) -> Tensor:
    """Return radians per token of each pair of dimensions: float32 [width / 2]."""
    exponent = torch.arange(0, spec.width, 2, dtype=torch.float32) / spec.width
    plain = 1.0 / spec.base**exponent / spec.factor
    scaling = spec.scaling
    if scaling is None:
        return plain
    wavelength = 2 * math.pi / plain
    share = (scaling.original_length / wavelength - scaling.low) / (scaling.high - scaling.low)
    # 1 keeps the frequency and 0 divides it, so the clamp covers wavelengths outside the range.
    share = share.clamp(0, 1)
    return (1 - share) * plain / scaling.factor + share * plain


def section_axes(sections: Sequence[int]) -> Tensor:
    """Return the axis of each frequency: int64 [width / 2], 0 = time, 1 = height, 2 = width of an image.

    Axes alternate while they last: frequency i takes the height if i % 3 == 1 and i < 3 * sections[1], the width if
    i % 3 == 2 and i < 3 * sections[2], else the time. Source: Qwen3-VL and Qwen3-Omni ("interleaved M-RoPE").
    """
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis, count in enumerate(sections[1:], start=1):
        axes[axis : 3 * count : 3] = axis
    return axes


class Rotary(nn.Module):
    """Rotary angles of packed tokens. Frequencies are float32 for every model dtype.

    Raises ConfigError if the sections do not add up to half the width.
    """

    frequencies: Tensor
    axes: Tensor | None

    def __init__(self, spec: RotarySpec) -> None:
        super().__init__()
        if spec.sections and (len(spec.sections) != 3 or 2 * sum(spec.sections) != spec.width):
            detail = f"{list(spec.sections)} for {spec.width} rotated dimensions"
            hint = "three sections must add up to half the dimensions"
            raise ConfigError("invalid sections of a rotary embedding", detail, hint, key="mrope_section")
        self.register_buffer("frequencies", frequencies(spec), persistent=False)
        axes = section_axes(spec.sections) if spec.sections else None
        self.register_buffer("axes", axes, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, float32 [T, 1, width].

        positions: int64 or float32, [T], or one row per axis [3, T] if the spec has sections. They can be fractional.
        """
        if positions.is_cuda and positions.is_contiguous():
            rotation: tuple[Tensor, Tensor] = elementwise_kernels().rotary_angles(
                positions, self.frequencies, self.axes
            )
            return rotation
        if positions.dim() == 2:
            per_axis = positions.float()[0 if self.axes is None else self.axes].reshape(-1, positions.shape[1]).T
        else:
            per_axis = positions.float()[:, None]
        angles = per_axis * self.frequencies.float()[None]
        both = torch.cat([angles, angles], dim=-1)[:, None]
        return both.cos(), both.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the first `width` dimensions of heads. x: [T, heads, head_dim]; cosine, sine: [T, 1, width]."""
    width = cosine.shape[-1]
    rotated, rest = x[..., :width], x[..., width:]
    half = width // 2
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    swapped = torch.cat([-rotated[..., half:], rotated[..., :half]], dim=-1)
    rotated = rotated * cosine + swapped * sine
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated
