"""Program of Wan 2.2: read texts and image, denoise with one expert or both in turn, decode. Run by the conductor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from mstar_core.plugin import ProgramRequest, Run
from mstar_core.plugin.program import ProgramGenerator

WALKS: Final = {"high": "denoise", "low": "denoise_low"}
"""Walks by the prefix of the inputs that hold the steps of an expert, in order."""

MOST_PREVIEWS: Final = 8
"""Most previews of a request."""


def until_preview(expert: str, number: int) -> str:
    """Return the input with the steps of an expert up to a preview; the input `expert` has the rest."""
    return f"{expert}_{number}"


def wan22(request: ProgramRequest) -> ProgramGenerator:
    """Run texts and the image, all steps, and the decoder frame by frame."""
    inputs = request.inputs
    named: dict[str, Any] = {}
    for port, name in (("text", "tokens"), ("negative", "negative_tokens")):
        if name in inputs:
            read = yield Run("encode_text", tokens=inputs[name], keep=("text",))
            named[port] = read.signals["text"]
    shown: dict[str, Any] = {}
    if "image" in inputs:
        pictures: dict[str, Any] = {name: inputs[name] for name in ("image", "last_image") if name in inputs}
        read = yield Run("encode_image", grid=inputs["grid"], keep=("condition",), **pictures)
        shown["condition"] = read.signals["condition"]
    yield Run("first_noise", grid=inputs["grid"])
    runs = [(expert, name) for expert in WALKS for name in _parts(expert) if name in inputs]
    for expert, name in runs:
        walk = WALKS[expert] if name == expert else f"{WALKS[expert]}_preview"
        table = inputs[name]
        done = yield Run(walk, steps=table, max_iters=len(table), keep=("latents",), **named, **shown)
    frames = len(inputs["grid"])
    latents = done.signals["latents"]
    yield Run("decode", latents=latents, memory=inputs["memory"], max_iters=frames, finishes=True, **shown)


def _parts(expert: str) -> Iterator[str]:
    """Yield the inputs that may hold steps of an expert, in order."""
    yield from (until_preview(expert, number) for number in range(MOST_PREVIEWS))
    yield expert
