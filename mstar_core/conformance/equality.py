"""Silver checks: an answer does not depend on batching, chunking or streaming. With the comparison of two outcomes.

Ids and text are compared exactly; audio, images and numbers within a tolerance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from mstar_core.api.output.units import OutputItem
from mstar_core.conformance.fake_api import joined
from mstar_core.conformance.miniature import miniature
from mstar_core.conformance.nodes import RuntimeSettings
from mstar_core.conformance.samples import greedy, mixed
from mstar_core.errors import EngineError
from mstar_core.plugin.conformance import Subject

if TYPE_CHECKING:
    from mstar_core.conformance.fake_api import RequestOutcome
    from mstar_core.transport.dtypes import Array

SMALL_BUDGET: Final = 5
"""Tokens of one step. Every prompt of the samples needs several steps."""

BATCH: Final = 6
IN_PIECES: Final = ("text", "audio")
"""Modalities whose chunks join to one file. Each chunk of the others is complete."""


def same_seed(subject: Subject) -> None:
    """Compare the bytes of repeated requests: in the same deployment, with its prefix cache, and in a new one."""
    small = miniature(subject)
    runtime = small.runtime()
    for ask in small.asks:
        for what in ("sent once more", "sent again"):
            require_same_bytes(small.alone(ask), runtime.ask(ask)[0], f"{ask.name} {what}")


def batch_equal(subject: Subject) -> None:
    """Compare greedy requests of mixed lengths and walks, batched together and alone."""
    small = miniature(subject)
    asks = [greedy(small.spec, ask) for ask in mixed(small.spec, BATCH)]
    for ask, outcome in zip(asks, small.runtime().ask(*asks), strict=True):
        require_equal(small.alone(ask), outcome, f"{ask.name} among {BATCH}")


def chunked_prefill(subject: Subject) -> None:
    """Compare chunked and whole prefill. A model without a KV cache passes, since its inputs are never chunked."""
    small = miniature(subject)
    if not small.has_cache:
        return
    asks = [greedy(small.spec, ask) for ask in small.asks]
    runtime = small.runtime(RuntimeSettings(token_budget=SMALL_BUDGET, prefix_cache=False))
    for ask, outcome in zip(asks, runtime.ask(*asks), strict=True):
        require_equal(small.alone(ask), outcome, f"{ask.name} in pieces of {SMALL_BUDGET}")


def stream_joined(subject: Subject) -> None:
    """Compare the joined chunks of a stream with the answer encoded at once."""
    small = miniature(subject)
    api = small.runtime().api
    for ask in small.asks:
        outcome = small.alone(ask)
        whole = joined(api.rendered(_merged(outcome.items)))
        for modality in sorted({item.modality for item in outcome.items}):
            if whole.get(modality, b"") != outcome.outputs.get(modality, b""):
                raise EngineError(
                    f"{ask.name}: the chunks of {modality} joined are not the whole answer",
                    f"{len(outcome.outputs.get(modality, b''))} bytes in chunks, {len(whole.get(modality, b''))} whole",
                    "give each chunk the bytes of its own values only",
                )


def _merged(items: tuple[OutputItem, ...]) -> list[OutputItem]:
    """Merge the outputs of each modality that is sent in pieces."""
    merged = [item for item in items if item.modality not in IN_PIECES]
    for modality in IN_PIECES:
        pieces = [item for item in items if item.modality == modality]
        if pieces:
            values = joined_values([item.array for item in pieces])
            merged.append(OutputItem(modality=modality, port=pieces[0].port, array=values))
    return merged


RELATIVE: Final = 1e-4
"""Tolerance of floats, relative and absolute: the effect of another summation order in float32."""

STEPS: Final = {"int16": 8, "uint8": 2}
"""Tolerances of quantised values, in steps."""


def require_equal(expected: RequestOutcome, actual: RequestOutcome, what: str) -> None:
    """Raise EngineError naming `what` if `got` is not the same answer as `wanted`."""
    if actual.status != expected.status:
        raise EngineError(f"{what}: the request {actual.status}", actual.cause)
    if (actual.reason, actual.counts) != (expected.reason, expected.counts):
        raise EngineError(
            f"{what}: the request ended differently",
            f"{actual.reason} {dict(actual.counts)} instead of {expected.reason} {dict(expected.counts)}",
        )
    for port in sorted({item.port for item in (*expected.items, *actual.items)}):
        modality = next(item.modality for item in (*expected.items, *actual.items) if item.port == port)
        require_port(modality, expected.of(port), actual.of(port), f"{what}: {modality} of port {port}")


def require_same_bytes(expected: RequestOutcome, actual: RequestOutcome, what: str) -> None:
    """Raise EngineError naming `what` if any byte differs."""
    if actual.status != expected.status:
        raise EngineError(f"{what}: the request {actual.status}", actual.cause)
    for modality in sorted({*expected.outputs, *actual.outputs}):
        first, second = expected.outputs.get(modality, b""), actual.outputs.get(modality, b"")
        if first != second:
            at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
            where = f"byte {at}" if at is not None else f"length: {len(second)} instead of {len(first)}"
            raise EngineError(f"{what}: {modality} differs", f"first at {where}")


def joined_values(arrays: list[Array]) -> Array:
    """Join all elements of some arrays, in order."""
    return np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.empty(0)


def require_port(
    modality: str, expected: list[Array], actual: list[Array], what: str, tolerance: float = RELATIVE
) -> None:
    """Raise EngineError naming `what` if the values of a port differ. tolerance: of floats, relative and absolute."""
    first, second = joined_values(expected), joined_values(actual)
    if first.shape != second.shape:
        raise EngineError(f"{what} has a different length", f"{second.size} elements instead of {first.size}")
    if modality == "text" or first.dtype.kind not in "fiu" or (first.dtype.kind == "i" and first.dtype.itemsize > 2):
        if not np.array_equal(first, second):
            raise EngineError(f"{what} differs", f"first at element {int(np.argmax(first != second))}")
        return
    wide_first, wide_second = first.astype(np.float64), second.astype(np.float64)
    allowed = STEPS.get(first.dtype.name, tolerance + tolerance * np.abs(wide_first))
    apart = np.abs(wide_first - wide_second)
    if first.dtype.kind == "f" and not (np.isfinite(wide_first).all() and np.isfinite(wide_second).all()):
        raise EngineError(f"{what} holds values that are not finite")
    if (apart > allowed).any():
        raise EngineError(f"{what} differs", f"by {apart.max():g} at element {int(np.argmax(apart))}")
