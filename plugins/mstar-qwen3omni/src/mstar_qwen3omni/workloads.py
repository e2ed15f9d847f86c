"""Load-test workload of Qwen3-Omni: spoken questions, some about an image, with spoken answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from mstar_core.workloads import ServedModel, WorkloadRequest, length, numbered, picture, recording

SECONDS: Final = (2.0, 10.0)
TINY_SECONDS: Final = (1.0, 2.0)
TINY_TALKER_TOKENS: Final = 24
FRAMES_PER_TOKEN: Final = 4
"""Frames of speech per token of text: about three tokens a second at 12.5 frames a second."""


def omni_speech(
    card: ServedModel, seed: int, *, least_out: int = 16, most_out: int = 96, image_share: float = 0.25, side: int = 512
) -> Iterator[WorkloadRequest]:
    """Yield recordings of 2 to 10 s, a share of them with an image, that ask for text and speech.

    The text has a fixed length, and speech ends after as many frames as it takes: weights that never end by themselves
    are measured like others.
    """
    for number, chance in enumerate(numbered(seed)):
        sound = recording(chance, chance.uniform(*(TINY_SECONDS if card.is_tiny else SECONDS)))
        files = [("question.wav", sound)]
        if chance.random() < image_share:
            files.insert(0, ("picture.png", picture(chance, 64 if card.is_tiny else side)))
        tokens = length(chance, least_out, most_out)
        params: dict[str, Any] = {
            "max_output_tokens": tokens,
            "ignore_eos": True,
            "seed": number,
            "talker_max_tokens": TINY_TALKER_TOKENS if card.is_tiny else FRAMES_PER_TOKEN * tokens,
        }
        yield WorkloadRequest(outputs=("text", "audio"), text="Answer the question.", files=tuple(files), params=params)
