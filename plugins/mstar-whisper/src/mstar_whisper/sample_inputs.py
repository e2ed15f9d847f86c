"""Sample inputs: a recording to text, and the same with times."""

from __future__ import annotations

import random
from pathlib import Path

from mstar_core.plugin import ModelSpec, SampleInputs
from mstar_core.workloads.media import recording


def make_samples(spec: ModelSpec, source: str, folder: Path | None) -> list[SampleInputs]:
    """Return two requests with a melody, which fits into one window."""
    files = (("speech.wav", recording(random.Random(1), 0.8 if source == "tiny" else 4.0)),)
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
