"""Random numbers as a function of (seed, counter), the same on any device, in any batch, after any preemption.

Used by the sampler and by nodes that need noise. Integer mixing after Steele, Lea, Flood, "Fast splittable
pseudorandom number generators" (2014), the 64-bit finaliser, on torch's wrapping int64.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor


Bits = TypeVar("Bits", "Tensor", np.ndarray)
"""int64 values on any device by torch, or a few on the host by numpy, without torch's cost per call."""


def to_int64(seed: int) -> int:
    """Fold any Python integer into the int64 range."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed


_GOLDEN: Final = to_int64(0x9E3779B97F4A7C15)
_MIX_1: Final = to_int64(0xBF58476D1CE4E5B9)
_MIX_2: Final = to_int64(0x94D049BB133111EB)
_STREAM: Final = to_int64(0xD1342543DE82EF95)
_UNIT: Final = 1.0 / (1 << 53)


def mix(state: Bits) -> Bits:
    """Scatter the bits of int64 values; a bijection."""
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _MIX_1
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _MIX_2
    mixed: Bits = state ^ ((state >> 31) & ((1 << 33) - 1))
    return mixed


def seeded(seed: Bits) -> Bits:
    """Return the state of a seed: int64 [...] -> int64 [...]. Callers keep it while the seed is the same."""
    return mix(seed * _STREAM + _GOLDEN)


def uniform_of(state: Tensor, counter: Tensor) -> Tensor:
    """Return float64 [...] in [0, 1) of a `seeded` state and int64 counters that broadcast with it."""
    bits = mix(state + (counter + 1) * _GOLDEN)
    return ((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) * _UNIT


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """Return float64 in [0, 1). seed, counter: int64, broadcast together."""
    return uniform_of(seeded(seed), counter)


def normal(seed: Tensor, counter: Tensor, count: int) -> Tensor:
    """Return standard normals: float32 [B, count]. seed, counter: int64 [B]; one counter value is one whole draw."""
    state = mix(seeded(seed) + (counter + 1) * _GOLDEN)[:, None]
    index = torch.arange(count, dtype=torch.int64, device=seed.device)[None]
    # 1 - u lies in (0, 1], so that the logarithm is finite.
    radius = torch.sqrt(-2.0 * torch.log(1.0 - uniform_of(state, 2 * index)))
    angle = 2.0 * math.pi * uniform_of(state, 2 * index + 1)
    return (radius * torch.cos(angle)).to(torch.float32)


def uniform_host(state: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """`uniform_of` on the host. int64 in, float64 out."""
    bits = mix(state + (counter + 1) * _GOLDEN)
    chance: np.ndarray = ((bits >> 11) & ((1 << 53) - 1)).astype(np.float64) * _UNIT
    return chance


def named_host(seed: np.ndarray, name: int) -> np.ndarray:
    """Return the states of a named series of random numbers, apart from the one that ids are drawn with.

    seed: int64 [n]. Returns int64 [n] for `uniforms_host`.
    """
    with np.errstate(over="ignore"):
        return mix(seeded(seed) + np.int64(name) * np.int64(_STREAM))


def uniforms_host(state: np.ndarray, counter: np.ndarray, count: int) -> np.ndarray:
    """Return `count` numbers in [0, 1) for each state and counter: float32 [n, count]. state, counter: int64 [n].

    They have 24 random bits, so that no number rounds up to 1.
    """
    number = counter[:, None] * count + np.arange(count, dtype=np.int64)
    with np.errstate(over="ignore"):
        bits = mix(state[:, None] + (number + 1) * _GOLDEN)
    uniforms: np.ndarray = ((bits >> 40) & ((1 << 24) - 1)).astype(np.float32) * np.float32(1.0 / (1 << 24))
    return uniforms
