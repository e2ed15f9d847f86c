"""Silver checks: an answer does not depend on batching, chunking or streaming."""

from __future__ import annotations

from typing import Final

from mstar_core.api.output.queue import OutputItem
from mstar_core.conformance.compare import joined_values, require_equal, require_same_bytes
from mstar_core.conformance.fake_api import joined
from mstar_core.conformance.miniature import miniature
from mstar_core.conformance.nodes import RuntimeSettings
from mstar_core.conformance.samples import greedy, mixed
from mstar_core.errors import EngineError
from mstar_core.plugin.conformance import Subject

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
