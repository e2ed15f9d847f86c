"""Request parameters of BAGEL, and the guidance derived from them. Used by api, program and processor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mstar_core.errors import RequestError
from mstar_core.families.step_cache import MOST_CACHED
from mstar_core.plugin import TextSampling, param, sampling_param

GLOBAL: Final = "global"
CHANNEL: Final = "channel"
TEXT_CHANNEL: Final = "text_channel"
RENORM_TYPES: Final = (GLOBAL, CHANNEL, TEXT_CHANNEL)
SIDE_MULTIPLE: Final = 16
LONGEST_SIDE: Final = 1024
TEXT_TEMPERATURE: Final = 0.3
"""Default temperature of sampled text."""

_SIZE = re.compile(r"^(\d{1,5})x(\d{1,5})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(TextSampling):
    """Parameters of a request. Defaults that depend on the task are null; `guidance` and `image_size` resolve them."""

    num_timesteps: int = param(
        50, "grid points of the flow; one more than steps", ge=2, le=1000, aliases=("num_inference_steps",)
    )
    timestep_shift: float = param(3.0, "warps flow time toward the noisy end; 1 is linear", ge=0.01, le=100)
    step_cache: float | None = param(
        None,
        "share of steps that extrapolate velocities instead of a forward pass; 0 is off. Default: the deployment's, 0",
        ge=0,
        le=MOST_CACHED,
    )
    cfg_text_scale: float = param(4.0, "text guidance; at most 1 switches guidance off", ge=0, le=100)
    cfg_img_scale: float | None = param(None, "image guidance; at most 1 is off. Default 1.0, edits 2.0", ge=0, le=100)
    cfg_interval: tuple[float, ...] | None = param(
        None, "flow times (low, high] that are guided. Default [0.4, 1.0], edits [0.0, 1.0]", ge=0, le=1, max_items=2
    )
    cfg_renorm_type: str | None = param(
        None, "norms that bound guidance. Default global, edits text_channel", choices=RENORM_TYPES
    )
    cfg_renorm_min: float = param(0.0, "least factor of the norm bound; 1 switches it off", ge=0, le=1)
    width: int | None = param(
        None, "pixels, a multiple of 16. Default 1024; edits keep the input's size within the box", ge=16, le=1024
    )
    height: int | None = param(
        None, "pixels, a multiple of 16. Default 1024; edits keep the input's size within the box", ge=16, le=1024
    )
    size: str | None = param(None, "WIDTHxHEIGHT or auto; width and height win over it", openai="size")
    think_mode: bool = param(False, "think in text before the answer or the image", aliases=("think",))
    max_think_tokens: int = param(1024, "most tokens of the thought before an image", ge=1)
    do_sample: bool | None = param(None, "draw text ids instead of taking the most likely. Default false")
    temperature: float | None = sampling_param(  # type: ignore[assignment]  # a number once `__post_init__` resolved it
        "temperature",
        None,
        "of text; 0 is greedy, above 0 switches sampling on. Default 0.3 with do_sample",
        aliases=("text_temperature",),
    )
    max_output_tokens: int = param(1024, "most text tokens of the answer", ge=1, openai="max_tokens")
    ignore_eos: bool = param(False, "for load tests: text goes on to its limit")
    prompt_format: str = param("reference", "layout of text segments", choices=("reference", "chatml"))
    image_preprocess: str = param("default", "resizing of input images", choices=("default", "vllm"))
    partial_images: int = param(0, "images in the making to send in a stream", ge=0, le=3)
    seed: int | None = param(None, "same seed, same image and text", ge=0, le=2**63 - 1, openai="seed")

    def __post_init__(self) -> None:
        # Resolve sampling and size here, so that all later code reads plain values.
        sampled = self.do_sample if self.do_sample is not None else bool(self.temperature)
        warmth = TEXT_TEMPERATURE if self.temperature is None else self.temperature
        object.__setattr__(self, "do_sample", sampled)
        object.__setattr__(self, "temperature", warmth if sampled else 0.0)
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
        for name, side in (("width", self.width), ("height", self.height)):
            if side is not None and (side % SIDE_MULTIPLE or not SIDE_MULTIPLE <= side <= LONGEST_SIDE):
                allowed = f"a multiple of {SIDE_MULTIPLE} up to {LONGEST_SIDE}"
                yield RequestError(
                    f"{name} is {side}, allowed is {allowed}", field=name, value=str(side), allowed=allowed
                )
        span = self.cfg_interval
        if span is not None and (len(span) != 2 or span[0] > span[1]):
            yield RequestError(
                "cfg_interval is not [low, high]", hint="two numbers from 0 to 1, the lower first", field="cfg_interval"
            )

    def image_size(self, longest: int = LONGEST_SIDE) -> tuple[int, int]:
        """Return width and height of a new image in pixels; for an edit, the box that it must fit in.

        longest: longest side that the checkpoint can generate.
        """
        return self.width or min(longest, LONGEST_SIDE), self.height or min(longest, LONGEST_SIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """Guidance of one image, with the defaults of its task. The processor passes it to the graph as numbers."""

    text_scale: float
    image_scale: float
    low: float
    high: float
    renorm_type: str
    renorm_min: float

    @property
    def is_on(self) -> bool:
        """Whether guidance is on: a text scale of at most 1 disables it."""
        return self.text_scale > 1

    def numbers(self) -> tuple[float, ...]:
        """Return the numbers of the port `guidance`: text scale, image scale, index of the renorm type, minimum."""
        return (self.text_scale, self.image_scale, float(RENORM_TYPES.index(self.renorm_type)), self.renorm_min)


def guidance(params: Params, *, is_edit: bool) -> Guidance:
    """Resolve the defaults of the task. An edit has an input image."""
    low, high = params.cfg_interval or ((0.0, 1.0) if is_edit else (0.4, 1.0))
    image_scale = params.cfg_img_scale if params.cfg_img_scale is not None else (2.0 if is_edit else 1.0)
    return Guidance(
        text_scale=params.cfg_text_scale,
        image_scale=image_scale,
        low=low,
        high=high,
        renorm_type=params.cfg_renorm_type or (TEXT_CHANNEL if is_edit else GLOBAL),
        renorm_min=params.cfg_renorm_min,
    )
