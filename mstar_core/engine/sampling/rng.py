"""Random numbers as a function of (seed, counter), the same on any device, in any batch, after any preemption.

Used by the sampler and by nodes that need noise. Integer mixing after Steele, Lea, Flood, "Fast splittable
pseudorandom number generators" (2014), the 64-bit finaliser, on torch's wrapping int64.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit constant."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN: Final = _signed(0x9E3779B97F4A7C15)
_MIX_1: Final = _signed(0xBF58476D1CE4E5B9)
_MIX_2: Final = _signed(0x94D049BB133111EB)
_STREAM: Final = _signed(0xD1342543DE82EF95)
_UNIT: Final = 1.0 / (1 << 53)


def mix(state: Tensor) -> Tensor:
    """Scatter the bits of int64 values; a bijection."""
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _MIX_1
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _MIX_2
    return state ^ ((state >> 31) & ((1 << 33) - 1))


def seeded(seed: Tensor) -> Tensor:
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


def seeded_host(seed: np.ndarray) -> np.ndarray:
    """`seeded` on the host. int64 in and out."""
    return _mix_host(seed * np.int64(_STREAM) + np.int64(_GOLDEN))


def uniform_host(state: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """`uniform_of` for a few items on the host, without torch's cost per call. int64 in, float64 out."""
    bits = _mix_host(state + (counter + 1) * np.int64(_GOLDEN))
    chance: np.ndarray = ((bits >> 11) & ((1 << 53) - 1)).astype(np.float64) * _UNIT
    return chance


def named_host(seed: np.ndarray, name: int) -> np.ndarray:
    """Return the states of a named series of random numbers, apart from the one that ids are drawn with.

    seed: int64 [n]. Returns int64 [n] for `uniforms_host`.
    """
    with np.errstate(over="ignore"):
        return _mix_host(seeded_host(seed) + np.int64(name) * np.int64(_STREAM))


def uniforms_host(state: np.ndarray, counter: np.ndarray, count: int) -> np.ndarray:
    """Return `count` numbers in [0, 1) for each state and counter: float32 [n, count]. state, counter: int64 [n].

    They have 24 random bits, so that no number rounds up to 1.
    """
    each = counter[:, None] * np.int64(count) + np.arange(count, dtype=np.int64)
    with np.errstate(over="ignore"):
        bits = _mix_host(state[:, None] + (each + 1) * np.int64(_GOLDEN))
    found: np.ndarray = ((bits >> 40) & ((1 << 24) - 1)).astype(np.float32) * np.float32(1.0 / (1 << 24))
    return found


def _mix_host(state: np.ndarray) -> np.ndarray:
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * np.int64(_MIX_1)
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * np.int64(_MIX_2)
    mixed: np.ndarray = state ^ ((state >> 31) & ((1 << 33) - 1))
    return mixed
