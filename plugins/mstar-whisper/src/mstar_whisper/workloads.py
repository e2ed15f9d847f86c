"""Load-test workload of Whisper: recordings of one window, with texts of a fixed length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mstar_core.workloads import ServedModel, WorkloadRequest, numbered, recording

SECONDS: Final = 30.0
TINY_SECONDS: Final = 0.9


def clips(card: ServedModel, seed: int, *, tokens: int = 100) -> Iterator[WorkloadRequest]:
    """Yield clips of 30 s. Each text has `tokens` ids, so that weights that never end are measured like others."""
    for number, chance in enumerate(numbered(seed)):
        sound = recording(chance, TINY_SECONDS if card.is_tiny else SECONDS)
        known = {"ignore_eos": True, "fallback": False, "language": "en", "max_output_tokens": tokens, "seed": number}
        yield WorkloadRequest(outputs=("text",), files=(("speech.wav", sound),), params=card.known(known))
