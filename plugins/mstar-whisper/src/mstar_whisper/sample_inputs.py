"""Sample inputs: a recording to text, and the same with times. The miniature's is a sentence of its world."""

from __future__ import annotations

import random
from pathlib import Path

from mstar_core.plugin import ModelSpec, SampleInputs
from mstar_core.workloads.media import recording
from mstar_whisper.checkpoint.shipped import FOLDER

SENTENCE = FOLDER / "sentence.wav"
"""A sentence by `orpheus:mini` that the miniature was not trained on; its text lies beside it."""


def make_samples(spec: ModelSpec, source: str, folder: Path | None) -> list[SampleInputs]:
    """Return two requests with one recording, which fits into one window: a melody, or a sentence."""
    melody = ("speech.wav", recording(random.Random(1), 0.8 if source == "tiny" else 4.0))
    files = ((SENTENCE.name, SENTENCE.read_bytes()) if source == "mini" else melody,)
    return [
        SampleInputs(name="recording", title="a recording to text", outputs=("text",), files=files),
        SampleInputs(
            name="times",
            title="the same with the times of its words",
            outputs=("text", "segments"),
            files=files,
            params={"timestamps": True, "words": True},
        ),
    ]
