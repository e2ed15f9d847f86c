"""Integer keys and fixed-point shares of logits, the arithmetic of all sampling kernels.

A key orders as its logit does. A share is a probability relative to the largest of its row, as an integer, so that
sums of shares do not depend on their order.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

LEAST: Final = tl.constexpr(-2139095041)
"""Key of minus infinity: every element is at or above it. Places outside of a row get a key below."""

OUTSIDE: Final = tl.constexpr(-(1 << 31))
INFINITY: Final = tl.constexpr(float("inf"))


@triton.jit
def ordered(x):
    """int32 that orders as the float32 does; -0 counts as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def distance_below(key, peak):
    """Distance of the value of a key from the largest."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return peak - bits.to(tl.float32, bitcast=True)


@triton.jit
def share_of(key, peak, unit):
    """exp(value - peak) in fixed point, int64: 0 to unit."""
    return (tl.exp(-distance_below(key, peak)) * unit).to(tl.int64)
