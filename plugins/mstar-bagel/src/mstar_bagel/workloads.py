"""Load-test workloads of BAGEL: images from text, and edits of images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from mstar_core.workloads import ServedModel, WorkloadRequest, numbered, picture, sentence

SIDES: Final = (512, 1024)
TINY_SIDE: Final = 64
TINY_STEPS: Final = 4
WORDS: Final = (6, 24)


def image_gen(card: ServedModel, seed: int, *, steps: int = 50) -> Iterator[WorkloadRequest]:
    """Yield texts that ask for an image of 512 x 512 or 1024 x 1024 pixels in `steps` denoise steps."""
    for number, chance in enumerate(numbered(seed)):
        side = TINY_SIDE if card.is_tiny else chance.choice(SIDES)
        params: dict[str, Any] = {"width": side, "height": side, "seed": number}
        yield WorkloadRequest(
            outputs=("image",),
            text=sentence(chance, chance.randint(*WORDS)),
            params={**params, "num_timesteps": TINY_STEPS if card.is_tiny else steps},
            expected={"size": [side, side]},
        )


def image_edit(card: ServedModel, seed: int, *, steps: int = 50, side: int = 512) -> Iterator[WorkloadRequest]:
    """Yield images with texts that ask for a change."""
    pixels = TINY_SIDE if card.is_tiny else side
    for number, chance in enumerate(numbered(seed)):
        yield WorkloadRequest(
            outputs=("image",),
            text=sentence(chance, chance.randint(*WORDS)),
            files=(("picture.png", picture(chance, pixels)),),
            params={"seed": number, "num_timesteps": TINY_STEPS if card.is_tiny else steps},
        )
