"""When two outcomes of one request are equal. Ids and text exactly; sound, pictures and numbers within a tolerance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from mstar_core.conformance.outcome import Item, Outcome
    from mstar_core.transport.dtypes import Array

RELATIVE: Final = 1e-4
ABSOLUTE: Final = 1e-4
"""Of floats: what another order of summation may change in float32."""

STEPS: Final = {"int16": 8, "uint8": 2}
"""Of quantised values: how many of their steps that may become."""


def require_equal(wanted: Outcome, got: Outcome, what: str) -> None:
    """Raise EngineError naming `what` when `got` is not the same answer as `wanted`."""
    if got.status != wanted.status:
        raise EngineError(f"{what}: the request {got.status}", got.cause)
    if (got.reason, got.counts) != (wanted.reason, wanted.counts):
        raise EngineError(
            f"{what}: it ended in another way",
            f"{got.reason} {dict(got.counts)} in place of {wanted.reason} {dict(wanted.counts)}",
        )
    for port in sorted({item.port for item in (*wanted.items, *got.items)}):
        modality = next(item.modality for item in (*wanted.items, *got.items) if item.port == port)
        _require_port(modality, wanted.of(port), got.of(port), f"{what}: {modality} of port {port}")


def require_same_bytes(wanted: Outcome, got: Outcome, what: str) -> None:
    """Raise EngineError naming `what` when any byte differs."""
    if got.status != wanted.status:
        raise EngineError(f"{what}: the request {got.status}", got.cause)
    for modality in sorted({*wanted.outputs, *got.outputs}):
        first, second = wanted.outputs.get(modality, b""), got.outputs.get(modality, b"")
        if first != second:
            at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
            where = f"byte {at}" if at is not None else f"length: {len(second)} in place of {len(first)}"
            raise EngineError(f"{what}: {modality} differs", f"first at {where}")


def joined_values(items: list[Item]) -> Array:
    """All elements of some items, in order."""
    return _flat([item.array for item in items])


def _flat(arrays: list[Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.empty(0)


def _require_port(modality: str, wanted: list[Array], got: list[Array], what: str) -> None:
    first, second = _flat(wanted), _flat(got)
    if first.shape != second.shape:
        raise EngineError(f"{what} has another length", f"{second.size} elements in place of {first.size}")
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
