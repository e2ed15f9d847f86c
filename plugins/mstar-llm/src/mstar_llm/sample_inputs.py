"""Sample inputs: a question."""

from __future__ import annotations

from pathlib import Path

from mstar_core.plugin import ModelSpec, SampleInputs

QUESTION = "Why is the sky blue?"


def make_samples(spec: ModelSpec, source: str, folder: Path | None) -> list[SampleInputs]:
    """Return one question: of the miniature one that it can answer, and its answers end by themselves."""
    trained_for = spec.prompt_of(source)
    return [
        SampleInputs(
            name="question",
            title="a question, answered in text",
            outputs=("text",),
            text=trained_for or QUESTION,
            params={} if trained_for else {"max_output_tokens": 256},
        )
    ]
