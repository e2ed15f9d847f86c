"""Sample inputs of Qwen3-TTS: a sentence, and for a cloned voice a recording of a tone."""

from __future__ import annotations

import random
from pathlib import Path

from mstar_core.plugin import ModelSpec, SampleInputs

SENTENCE = "Hello there, how are you today?"


def make_samples(spec: ModelSpec, source: str, folder: Path | None) -> list[SampleInputs]:
    """Return one sentence, with a recording if the model clones voices."""
    if spec.input("audio") is None:
        text = spec.prompt_of(source) or SENTENCE
        return [SampleInputs(name="speech", title="a sentence, spoken", outputs=("audio",), text=text)]
    from mstar_core.workloads.media import recording

    sample = SampleInputs(
        name="clone",
        title="a sentence in the voice of a recording",
        outputs=("audio",),
        text=SENTENCE,
        files=(("voice.wav", recording(random.Random(1), 3.0)),),
    )
    return [sample]
