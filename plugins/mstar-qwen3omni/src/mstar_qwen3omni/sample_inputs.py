"""Sample inputs of Qwen3-Omni: questions about a picture, a clip and a sound, answered in text and in speech."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from mstar_core.plugin import ModelSpec, SampleInputs
from mstar_core.workloads.media import ball_clip, ball_picture, clip, png, recording
from mstar_qwen3omni import world
from mstar_qwen3omni.checkpoint.shipped import FOLDER

SIDE = 448
FRAMES = 16
SEVEN = FOLDER / "seven.wav"
"""A spoken digit in a voice that the miniature was not trained on."""

ITEMS = (
    world.Item(shape="circle", colour="red", x=20, y=20, size=24),
    world.Item(shape="cross", colour="yellow", x=75, y=50, size=24),
)
SMALL: dict[str, Any] = {"max_output_tokens": 24}
FEW: dict[str, Any] = {"talker_max_tokens": 12}
"""Limits of text and speech from random weights, which rarely end by themselves."""


def make_samples(spec: ModelSpec, source: str, folder: Path | None) -> list[SampleInputs]:
    """Return four requests, three if the checkpoint does not speak. The miniature's are of its own world."""
    if source == "mini":
        samples = _of_world(spec.mini_prompt)
    else:
        samples = _of_anything(SMALL if source == "tiny" else {}, FEW if source == "tiny" else {})
    return [sample for sample in samples if all(spec.output(kind) is not None for kind in sample.outputs)]


def _of_world(question: str) -> list[SampleInputs]:
    picture = (("picture.png", png(world.render(ITEMS))),)
    mover = world.Question(
        text=world.MOVES[0],
        answer="right",
        kind="video",
        items=(world.Item(shape="circle", colour="green", x=48, y=48, size=24),),
        way="right",
    )
    film = (("clip.mp4", clip(mover.frames(), world.RATE)),)
    exact: dict[str, Any] = {"temperature": 0}
    return [
        SampleInputs(
            name="picture",
            title="a picture and a question to text",
            outputs=("text",),
            text=question,
            files=picture,
            params=exact,
        ),
        SampleInputs(
            name="spoken",
            title="the same, answered in speech too",
            outputs=("text", "audio"),
            text=question,
            files=picture,
            params={**exact, "seed": 1},
        ),
        SampleInputs(
            name="clip",
            title="a clip and a question to text",
            outputs=("text",),
            text=mover.text,
            files=film,
            params={**exact, "video_min_pixels": world.SIDE**2},
        ),
        SampleInputs(
            name="sound",
            title="a spoken digit and a question to text",
            outputs=("text",),
            text=world.HEARD[0],
            files=(("sound.wav", SEVEN.read_bytes()),),
            params=exact,
        ),
    ]


def _of_anything(text: dict[str, Any], speech: dict[str, Any]) -> list[SampleInputs]:
    picture = (("picture.png", png(ball_picture(SIDE, 0.5))),)
    return [
        SampleInputs(
            name="picture",
            title="a picture and a question to text",
            outputs=("text",),
            text="What is in this picture?",
            files=picture,
            params=text,
        ),
        SampleInputs(
            name="spoken",
            title="the same, answered in speech too",
            outputs=("text", "audio"),
            text="What is in this picture?",
            files=picture,
            params={**text, **speech},
        ),
        SampleInputs(
            name="clip",
            title="a clip and a question to text",
            outputs=("text",),
            text="Which way does the ball move?",
            files=(("clip.mp4", clip(ball_clip(FRAMES, SIDE))),),
            params=text,
        ),
        SampleInputs(
            name="sound",
            title="a melody and a question to text",
            outputs=("text",),
            text="What do you hear?",
            files=(("sound.wav", recording(random.Random(1), 3.0)),),
            params=text,
        ),
    ]
