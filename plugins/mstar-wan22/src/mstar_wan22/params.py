"""Request parameters of Wan 2.2. Used by api, program and processor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mstar_core.errors import RequestError
from mstar_core.families.step_cache import MOST_CACHED
from mstar_core.plugin import param
from mstar_wan22.program import MOST_PREVIEWS
from mstar_wan22.request.grids import GRIDS, SOLVERS

LONGEST_SIDE: Final = 2048
MOST_FRAMES: Final = 4093

_SIZE: Final = re.compile(r"^(\d{1,5})x(\d{1,5})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Parameters of a request. Defaults that depend on the checkpoint are null; the processor resolves them."""

    width: int | None = param(None, "pixels. Default 1280; with an image, of its ratio", ge=16, le=LONGEST_SIDE)
    height: int | None = param(None, "pixels. Default 704 or 720; with an image, of its ratio", ge=16, le=LONGEST_SIDE)
    size: str | None = param(None, "WIDTHxHEIGHT or auto; width and height win over it", openai="size")
    num_frames: int | None = param(
        None, "frames, one more than a multiple of 4. Default 121, or 81 at 16 frames per second", ge=1, le=MOST_FRAMES
    )
    seconds: float | None = param(None, "length, rounded to whole latent frames; num_frames wins", gt=0, le=300)
    fps: int | None = param(None, "frames per second of the file. Default 24, or 16 with two experts", ge=1, le=120)
    num_inference_steps: int | None = param(None, "denoise steps. Default 50, or 40 with two experts", ge=1, le=100)
    step_cache: float | None = param(
        None,
        "share of steps that extrapolate velocities instead of a forward pass; 0 is off. Default: the deployment's, 0",
        ge=0,
        le=MOST_CACHED,
    )
    guidance_scale: float | None = param(
        None, "guidance; at most 1 switches it off. Default 5.0; with two experts of the first, 4.0 or 3.5", ge=0, le=30
    )
    guidance_scale_2: float | None = param(
        None, "guidance of the second expert. Default: 3.0 or 3.5, or guidance_scale if that is given", ge=0, le=30
    )
    flow_shift: float | None = param(
        None, "above 1: more steps at high noise. Default 5.0, text to video with two experts 12.0", ge=0.01, le=100
    )
    negative_prompt: str | None = param(
        None, "text to move away from. Null: the deployment's, by default the official one. May be empty"
    )
    solver: str = param("unipc", "solver of the flow", choices=SOLVERS)
    sigma_grid: str = param("diffusers", "noise levels of unipc", choices=GRIDS)
    image_fit: str = param("cover", "an image of another ratio is cut or stretched", choices=("cover", "stretch"))
    partial_images: int = param(0, "previews of the middle frame to send during denoising", ge=0, le=MOST_PREVIEWS)
    seed: int | None = param(None, "same seed, same video", ge=0, le=2**63 - 1, openai="seed")

    def __post_init__(self) -> None:
        match = _SIZE.match(self.size or "")
        if match is not None:
            object.__setattr__(self, "width", self.width or int(match[1]))
            object.__setattr__(self, "height", self.height or int(match[2]))

    def check(self) -> Iterator[RequestError]:
        """Check rules across fields."""
        if self.size is not None and self.size != "auto" and _SIZE.match(self.size) is None:
            yield RequestError(
                f"size is {self.size!r}", hint='send "WIDTHxHEIGHT" or "auto"', field="size", value=self.size
            )
        if (self.width is None) != (self.height is None):
            missing = "width" if self.width is None else "height"
            yield RequestError(f"{missing} is missing", hint="send both sides, or none", field=missing)
