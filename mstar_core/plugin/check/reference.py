"""Reference of a model: an independent computation whose outputs the gold checks compare. Offered by plugins.

A plugin offers `reference(folder, request) -> Mapping[str, np.ndarray]` in a module `reference` beside its model: the
values of the ports that go to the client, by port, for greedy decoding. Write it from the paper, or call the library
that the weights were published for. A reference that shares code with the model proves nothing about that code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mstar_core.plugin.processor import SegmentInputs

if TYPE_CHECKING:
    import numpy as np

MODULE: Final = "reference"
FUNCTION: Final = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRequest:
    """One request as its programs and nodes get it. Its temperatures are 0, so ids are the most likely ones.

    arrays, segments, facts: of the processor, see `Inputs`. params: the model's parameters with the lowered limits.
    seed: of random numbers, such as the noise of a diffusion. outputs: requested modalities.
    """

    arrays: Mapping[str, np.ndarray]
    segments: Sequence[SegmentInputs] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    params: Any = None
    seed: int = 0
    outputs: frozenset[str] = frozenset()


Reference = Callable[[Path, ReferenceRequest], "Mapping[str, np.ndarray]"]


def greedy_ids(
    logits: Callable[[list[int]], np.ndarray], *, ends: Collection[int], limit: int, suppress: Collection[int] = ()
) -> list[int]:
    """Return the most likely ids up to one of `ends`, which is the last, or to the limit.

    logits: of the next id, float [vocab], after the ids written so far. suppress: ids that are never drawn.
    """
    written: list[int] = []
    while len(written) < limit:
        scores = logits(list(written))
        if suppress:
            scores = scores.copy()
            scores[list(suppress)] = float("-inf")
        written.append(int(scores.argmax()))
        if written[-1] in ends:
            break
    return written
