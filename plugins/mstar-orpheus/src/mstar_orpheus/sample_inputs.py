"""Sample inputs of Orpheus: a sentence that its weights can speak."""

from __future__ import annotations

from pathlib import Path

from mstar_core.plugin import ModelSpec, SampleInputs

SENTENCE = "Hello there, how are you today?"


def make_samples(spec: ModelSpec, source: str, folder: Path | None) -> list[SampleInputs]:
    """Return one sentence."""
    return [
        SampleInputs(
            name="speech",
            title="a sentence, spoken",
            outputs=("audio",),
            text=spec.prompt_of(source) or SENTENCE,
            params={"voice": "tara"},
        )
    ]
