"""Sample inputs of Wan 2.2: a text to a video, and a picture to a video."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from mstar_core.plugin import Image, ModelSpec, SampleInputs
from mstar_core.workloads.media import ball_picture, png
from mstar_wan22 import moves
from mstar_wan22.plugin import TINY

LAKE: Final = "A small red boat drifts on a calm lake, morning light"
SHORT: Final[dict[str, Any]] = {"width": 832, "height": 480, "num_frames": 33}


def make_samples(spec: ModelSpec, source: str, folder: Path | None) -> list[SampleInputs]:
    """Return a request per task. The miniature's are of the world that it was trained on."""
    if source == "mini":
        return [
            _drawn(spec.mini_prompt, moves.PARAMS),
            _animated("a red circle moves down", moves.first_picture(), moves.PARAMS),
        ]
    size = TINY if source == "tiny" else SHORT
    picture = png(ball_picture(64 if source == "tiny" else 512, 0.5))
    image = spec.input("image")
    animated = [_animated("the ball rolls to the right", picture, size)] if image is not None else []
    needs_image = isinstance(image, Image) and image.max_count == 2
    return animated if needs_image else [_drawn(LAKE, size), *animated]


def _drawn(text: str, params: dict[str, Any]) -> SampleInputs:
    title = "a text to a video"
    return SampleInputs(name="film", title=title, outputs=("video",), text=text, params={"seed": 1, **params})


def _animated(text: str, picture: bytes, params: dict[str, Any]) -> SampleInputs:
    return SampleInputs(
        name="animate",
        title="a picture and a text to a video",
        outputs=("video",),
        text=text,
        files=(("picture.png", picture),),
        params={"seed": 1, **params},
    )
