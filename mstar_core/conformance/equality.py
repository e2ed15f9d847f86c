"""Silver: an answer does not depend on how it was computed or sent. Each check takes a Subject."""

from __future__ import annotations

from typing import Final

from mstar_core.conformance.compare import joined_values, require_equal, require_same_bytes
from mstar_core.conformance.desk import joined
from mstar_core.conformance.material import greedy, mixed
from mstar_core.conformance.miniature import miniature
from mstar_core.conformance.nodes import Settings
from mstar_core.conformance.outcome import Item
from mstar_core.errors import EngineError
from mstar_core.plugin.conformance import Subject

SMALL_BUDGET: Final = 5
"""Tokens of one step: every prompt of the samples needs several."""

BATCH: Final = 6
IN_PIECES: Final = ("text", "audio")
"""Modalities whose chunks are pieces of one whole; of the others each chunk is a whole."""


def same_seed(subject: Subject) -> None:
    """A request gives the same bytes again in the same deployment, where its prompt may be cached, and in another."""
    small = miniature(subject)
    bench = small.bench()
    for ask in small.asks:
        for what in ("sent once more", "sent again"):
            require_same_bytes(small.alone(ask), bench.ask(ask)[0], f"{ask.name} {what}")


def batch_equal(subject: Subject) -> None:
    """Requests of mixed lengths and walks, without chance, give together what each gives alone."""
    small = miniature(subject)
    asks = [greedy(small.spec, ask) for ask in mixed(small.spec, BATCH)]
    for ask, outcome in zip(asks, small.bench().ask(*asks), strict=True):
        require_equal(small.alone(ask), outcome, f"{ask.name} among {BATCH}")


def chunked_prefill(subject: Subject) -> None:
    """With a budget below the length of every prompt, and nothing cached, the answers stay. Without a cache nothing is
    ever read in pieces, and the check holds."""
    small = miniature(subject)
    if not small.has_cache:
        return
    asks = [greedy(small.spec, ask) for ask in small.asks]
    bench = small.bench(Settings(token_budget=SMALL_BUDGET, prefix_cache=False))
    for ask, outcome in zip(asks, bench.ask(*asks), strict=True):
        require_equal(small.alone(ask), outcome, f"{ask.name} in pieces of {SMALL_BUDGET}")


def stream_joined(subject: Subject) -> None:
    """What a stream's chunks make when joined equals the answer turned into bytes at once."""
    small = miniature(subject)
    desk = small.bench().desk
    for ask in small.asks:
        outcome = small.alone(ask)
        whole = joined(desk.rendered(_merged(outcome.items)))
        for modality in sorted({item.modality for item in outcome.items}):
            if whole.get(modality, b"") != outcome.outputs.get(modality, b""):
                raise EngineError(
                    f"{ask.name}: the chunks of {modality} joined are not the whole answer",
                    f"{len(outcome.outputs.get(modality, b''))} bytes in chunks, {len(whole.get(modality, b''))} whole",
                    "give each chunk the bytes of its own values only",
                )


def _merged(items: tuple[Item, ...]) -> list[Item]:
    """The items of each modality that comes in pieces as one item."""
    merged = [item for item in items if item.modality not in IN_PIECES]
    for modality in IN_PIECES:
        pieces = [item for item in items if item.modality == modality]
        if pieces:
            merged.append(Item(modality=modality, port=pieces[0].port, array=joined_values(pieces)))
    return merged
