"""Load-test workload of cloned voices: each speech has the recording of another voice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mstar_core.workloads import ServedModel, WorkloadRequest, numbered, recording, sentence

SECONDS: Final = 3.0


def clones(
    card: ServedModel, seed: int, *, least: int = 8, most: int = 25, frames: int = 4
) -> Iterator[WorkloadRequest]:
    """Yield sentences of `least` to `most` words with a recording of 3 s. frames: forced length of speech per word."""
    for number, chance in enumerate(numbered(seed)):
        words = chance.randint(least, most)
        forced = {"max_output_tokens": frames * words, "ignore_eos": True, "seed": number}
        sound = recording(chance, SECONDS)
        text = sentence(chance, words)
        yield WorkloadRequest(outputs=("audio",), text=text, files=(("voice.wav", sound),), params=card.known(forced))
