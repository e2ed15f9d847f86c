"""Comparison of two outcomes of one request: ids and text exactly; audio, images and numbers within a tolerance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from mstar_core.conformance.fake_api import RequestOutcome
    from mstar_core.transport.dtypes import Array

RELATIVE: Final = 1e-4
ABSOLUTE: Final = 1e-4
"""Tolerances of floats: the effect of another summation order in float32."""

STEPS: Final = {"int16": 8, "uint8": 2}
"""Tolerances of quantised values, in steps."""


def require_equal(wanted: RequestOutcome, got: RequestOutcome, what: str) -> None:
    """Raise EngineError naming `what` if `got` is not the same answer as `wanted`."""
    if got.status != wanted.status:
        raise EngineError(f"{what}: the request {got.status}", got.cause)
    if (got.reason, got.counts) != (wanted.reason, wanted.counts):
        raise EngineError(
            f"{what}: the request ended differently",
            f"{got.reason} {dict(got.counts)} instead of {wanted.reason} {dict(wanted.counts)}",
        )
    for port in sorted({item.port for item in (*wanted.items, *got.items)}):
        modality = next(item.modality for item in (*wanted.items, *got.items) if item.port == port)
        _require_port(modality, wanted.of(port), got.of(port), f"{what}: {modality} of port {port}")


def require_same_bytes(wanted: RequestOutcome, got: RequestOutcome, what: str) -> None:
    """Raise EngineError naming `what` if any byte differs."""
    if got.status != wanted.status:
        raise EngineError(f"{what}: the request {got.status}", got.cause)
    for modality in sorted({*wanted.outputs, *got.outputs}):
        first, second = wanted.outputs.get(modality, b""), got.outputs.get(modality, b"")
        if first != second:
            at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
            where = f"byte {at}" if at is not None else f"length: {len(second)} instead of {len(first)}"
            raise EngineError(f"{what}: {modality} differs", f"first at {where}")


def joined_values(arrays: list[Array]) -> Array:
    """Join all elements of some arrays, in order."""
    return np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.empty(0)


def _require_port(modality: str, wanted: list[Array], got: list[Array], what: str) -> None:
    first, second = joined_values(wanted), joined_values(got)
    if first.shape != second.shape:
        raise EngineError(f"{what} has a different length", f"{second.size} elements instead of {first.size}")
    if modality == "text" or first.dtype.kind not in "fiu" or (first.dtype.kind == "i" and first.dtype.itemsize > 2):
        if not np.array_equal(first, second):
            raise EngineError(f"{what} differs", f"first at element {int(np.argmax(first != second))}")
        return
    wide_first, wide_second = first.astype(np.float64), second.astype(np.float64)
    allowed = STEPS.get(first.dtype.name, ABSOLUTE + RELATIVE * np.abs(wide_first))
    apart = np.abs(wide_first - wide_second)
    if first.dtype.kind == "f" and not (np.isfinite(wide_first).all() and np.isfinite(wide_second).all()):
        raise EngineError(f"{what} holds values that are not finite")
    if (apart > allowed).any():
        raise EngineError(f"{what} differs", f"by {apart.max():g} at element {int(np.argmax(apart))}")
