"""Program of Wan 2.2: read texts and image, denoise with one expert or both in turn, decode. Run by the conductor."""

from __future__ import annotations

from typing import Any, Final

from mstar_core.plugin import ProgramRequest, Run
from mstar_core.plugin.program import ProgramGenerator

WALKS: Final = {"high": "denoise", "low": "denoise_low"}
"""Walks of the experts, in order."""

MOST_PREVIEWS: Final = 8
"""Most previews of a request."""


def step_inputs(expert: str) -> tuple[str, ...]:
    """Return the inputs that may hold steps of an expert, in order: up to each preview, then the rest."""
    return (*(f"{expert}_{number}" for number in range(MOST_PREVIEWS)), expert)


def wan22(request: ProgramRequest) -> ProgramGenerator:
    """Run texts and the image, all steps, and the decoder frame by frame."""
    inputs = request.inputs
    texts: dict[str, Any] = {}
    for port, name in (("text", "tokens"), ("negative", "negative_tokens")):
        if name in inputs:
            read = yield Run("encode_text", tokens=inputs[name], keep=("text",))
            texts[port] = read.signals["text"]
    shown: dict[str, Any] = {}
    if "image" in inputs:
        pictures: dict[str, Any] = {name: inputs[name] for name in ("image", "last_image") if name in inputs}
        read = yield Run("encode_image", grid=inputs["grid"], keep=("condition",), **pictures)
        shown["condition"] = read.signals["condition"]
    yield Run("first_noise", grid=inputs["grid"])
    for expert, walk in WALKS.items():
        for name in (name for name in step_inputs(expert) if name in inputs):
            table, kind = inputs[name], walk if name == expert else f"{walk}_preview"
            done = yield Run(kind, steps=table, max_iters=len(table), keep=("latents",), **texts, **shown)
    latents, frames = done.signals["latents"], len(inputs["grid"])
    yield Run("decode", latents=latents, memory=inputs["memory"], max_iters=frames, finishes=True, **shown)
