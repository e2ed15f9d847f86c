"""Load-test workloads of Wan 2.2: videos from texts, and from images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from mstar_core.workloads import ServedModel, WorkloadRequest, numbered, picture, sentence
from mstar_wan22.plugin import TINY

WORDS: Final = (8, 24)


def video_gen(
    card: ServedModel, seed: int, *, width: int = 832, height: int = 480, frames: int = 33, steps: int = 20
) -> Iterator[WorkloadRequest]:
    """Yield texts that ask for a video of this size."""
    for number, chance in enumerate(numbered(seed)):
        params = TINY if card.is_tiny else _params(width, height, frames, steps)
        yield WorkloadRequest(
            outputs=("video",), text=sentence(chance, chance.randint(*WORDS)), params={**params, "seed": number}
        )


def video_animate(
    card: ServedModel, seed: int, *, width: int = 832, height: int = 480, frames: int = 33, steps: int = 20
) -> Iterator[WorkloadRequest]:
    """Yield images with texts that say what happens."""
    for number, chance in enumerate(numbered(seed)):
        params = TINY if card.is_tiny else _params(width, height, frames, steps)
        yield WorkloadRequest(
            outputs=("video",),
            text=sentence(chance, chance.randint(*WORDS)),
            files=(("picture.png", picture(chance, 64 if card.is_tiny else 512)),),
            params={**params, "seed": number},
        )


def _params(width: int, height: int, frames: int, steps: int) -> dict[str, Any]:
    return {"width": width, "height": height, "num_frames": frames, "num_inference_steps": steps}
