"""Sample inputs: a question."""

from __future__ import annotations

from pathlib import Path

from mstar_core.plugin import ModelSpec, SampleInputs

QUESTION = "Why is the sky blue?"


def make_samples(spec: ModelSpec, source: str, folder: Path | None) -> list[SampleInputs]:
    """Return one question."""
    return [
        SampleInputs(
            name="question",
            title="a question, answered in text",
            outputs=("text",),
            text=spec.prompt_of(source) or QUESTION,
            params={"max_output_tokens": 256},
        )
    ]
