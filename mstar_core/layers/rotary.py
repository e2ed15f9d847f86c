"""Rotary position embedding, half-split layout, with Llama 3 frequency scaling. Used by model plugins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mstar_core.errors import ConfigError
from mstar_core.layers.packing import kernels

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Lengthens slow rotations by `factor`. Lengths are in tokens; source: Llama 3.1's published configuration."""

    factor: float
    low: float
    high: float
    original_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """How positions turn into angles. width: rotated dimensions of a head (even)."""

    width: int
    base: float = 10000.0
    scaling: Llama3Scaling | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], width: int) -> RotarySpec:
        """Read either style of a published config: `rope_parameters`, or `rope_theta` with `rope_scaling`.

        Raises ConfigError for a scaling that is not known.
        """
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        base = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return cls(width=width, base=base)
        if kind != "llama3":
            raise ConfigError(f"rope type {kind!r} is not known", hint="default and llama3 are", key="rope_type")
        scaling = Llama3Scaling(
            factor=float(rope["factor"]),
            low=float(rope["low_freq_factor"]),
            high=float(rope["high_freq_factor"]),
            original_length=int(rope["original_max_position_embeddings"]),
        )
        return cls(width=width, base=base, scaling=scaling)


def frequencies(spec: RotarySpec) -> Tensor:
    """Radians per token of each pair of dimensions: float32 [width / 2]."""
    exponent = torch.arange(0, spec.width, 2, dtype=torch.float32) / spec.width
    plain = 1.0 / spec.base**exponent
    scaling = spec.scaling
    if scaling is None:
        return plain
    wavelength = 2 * math.pi / plain
    share = (scaling.original_length / wavelength - scaling.low) / (scaling.high - scaling.low)
    # A clamped share covers the outer cases: 1 keeps the frequency, 0 divides it.
    share = share.clamp(0, 1)
    return (1 - share) * plain / scaling.factor + share * plain


class Rotary(nn.Module):
    """Angles of packed tokens. Holds float32 frequencies whatever the model's dtype."""

    frequencies: Tensor

    def __init__(self, spec: RotarySpec) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies(spec), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: int64 [T]. Returns cosine and sine, float32 [T, 1, width]."""
        if positions.is_cuda and positions.dim() == 1 and positions.is_contiguous():
            made: tuple[Tensor, Tensor] = kernels().angles(positions, self.frequencies)
            return made
        angles = positions[:, None].float() * self.frequencies.float()[None]
        both = torch.cat([angles, angles], dim=-1)[:, None]
        return both.cos(), both.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the first `width` dimensions of heads. x: [T, heads, head_dim]; cosine, sine: [T, 1, width]."""
    width = cosine.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    half = width // 2
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    swapped = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
    turned = turned * cosine + swapped * sine
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
