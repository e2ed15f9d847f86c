"""Sample inputs of BAGEL: a text to draw, a picture to describe, and a picture to edit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mstar_bagel import shapes
from mstar_core.plugin import ModelSpec, SampleInputs
from mstar_core.workloads.media import ball_picture, png

SIDE = 512
TINY_SIDE = 64
LAKE = "A small red boat on a calm lake, morning light"
SHORT: dict[str, Any] = {"max_output_tokens": 24}
"""Limit of text from random weights, which rarely ends by itself."""

FEW: dict[str, Any] = {"num_timesteps": 4}


def make_samples(spec: ModelSpec, source: str, folder: Path | None) -> list[SampleInputs]:
    """Return three requests. The miniature's picture is of the world that it was trained on."""
    if source == "mini":
        circle = (shapes.Thing("red", "circle"),)
        picture = png(shapes.render(circle, [(shapes.SIDE / 2, shapes.SIDE / 2, 11.0)]))
        return _three(spec.mini_prompt, picture, shapes.QUESTION, shapes.Edit(circle[0], "blue").sentence, {}, {})
    is_tiny = source == "tiny"
    picture = png(ball_picture(TINY_SIDE if is_tiny else SIDE, 0.5))
    size = {"width": TINY_SIDE, "height": TINY_SIDE, **FEW} if is_tiny else {}
    return _three(LAKE, picture, "What is in this picture?", "make the ball green", size, SHORT if is_tiny else {})


def _three(
    drawn: str, picture: bytes, question: str, change: str, size: dict[str, Any], text: dict[str, Any]
) -> list[SampleInputs]:
    files = (("picture.png", picture),)
    edit = {"num_timesteps": size["num_timesteps"]} if size else {}
    return [
        SampleInputs(
            name="draw", title="a text to a picture", outputs=("image",), text=drawn, params={"seed": 1, **size}
        ),
        SampleInputs(
            name="describe",
            title="a picture and a question to text",
            outputs=("text",),
            text=question,
            files=files,
            params={"temperature": 0, **text},
        ),
        SampleInputs(
            name="edit",
            title="a picture and a change to a picture",
            outputs=("image",),
            text=change,
            files=files,
            params={"seed": 1, **edit},
        ),
    ]
