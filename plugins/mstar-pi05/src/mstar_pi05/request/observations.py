"""Observations of openpi's robot clients: conversion to images, state and text. Used behind the robot
policy route.

Each robot has its own keys. Keys that the model does not use are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mstar_core.errors import RequestError, did_you_mean
from mstar_pi05.checkpoint.config import CAMERAS
from mstar_pi05.request.images import Pixels
from mstar_pi05.robots.layouts import IGNORED, Layout, layout_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A decoded observation. images: the sent cameras in the model's order, uint8 [h, w, 3].

    mask: per camera of the model, whether it was sent. state: as the robot reports it. State and prompt may
    be None.
    """

    images: tuple[Pixels, ...]
    mask: tuple[bool, bool, bool]
    state: tuple[float, ...] | None
    prompt: str | None


def read_observation(message: Any, robot: str | None, size: int | None = None) -> Observation:
    """Convert a decoded message. robot: selects the keys; None = the model's own. size: number of values of the state,
    None = unknown; used in hints. Raises RequestError naming the key and what is expected.
    """
    layout = layout_of(robot)
    hint = f"send {layout.keys(size)}"
    if not isinstance(message, Mapping):
        raise RequestError("the observation must be a map", hint=hint, field="observation")
    images = _images(message, layout, hint)
    keys = layout.state or [key for key in ("state",) if message.get(key) is not None]
    state = [value for key in keys for value in _numbers(_required(message, key, hint), key)]
    first, second, third = (image is not None for image in images)
    return Observation(
        images=tuple(image for image in images if image is not None),
        mask=(first, second, third),
        state=tuple(state) if keys else None,
        prompt=_prompt(message.get("prompt")),
    )


def _images(message: Mapping[str, Any], layout: Layout, hint: str) -> list[Pixels | None]:
    sent = message if layout.images_in is None else _required(message, layout.images_in, hint)
    if not isinstance(sent, Mapping):
        raise RequestError(
            f"{layout.images_in} must be a map", hint="send a map from camera to image", field=str(layout.images_in)
        )
    if layout.images_in is not None:
        known = [key for key in layout.images if key] + sorted(IGNORED)
        for key in sent:
            if key not in known:
                raise RequestError(
                    f"unknown camera {str(key)[:40]!r}", hint=did_you_mean(str(key), known), field="images"
                )
    pictures: list[Pixels | None] = []
    for key, _ in zip(layout.images, CAMERAS, strict=True):
        value = sent.get(key) if key is not None else None
        if value is None and key in layout.needed:
            raise RequestError(f"{key} is missing", hint=hint, field=str(key), code="missing_field")
        pictures.append(None if value is None else image(value, str(key)))
    return pictures


def image(value: Any, key: str) -> Pixels:
    """Convert an image to uint8 [h, w, 3]. value: uint8, or floats in [0, 1]; [h, w, 3] or [3, h, w].
    Raises RequestError.
    """
    try:
        pixels = np.asarray(value)
    except ValueError as error:
        raise RequestError(f"{key} must be an array", str(error), "send [h, w, 3]", field=key) from error
    if pixels.ndim != 3 or 3 not in (pixels.shape[0], pixels.shape[2]) or not pixels.size:
        raise RequestError(f"{key} has shape {list(pixels.shape)}", hint="send [h, w, 3]", field=key)
    if pixels.shape[0] == 3:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.dtype == np.uint8:
        return np.ascontiguousarray(pixels)
    if pixels.dtype.kind != "f":
        raise RequestError(f"{key} is {pixels.dtype.name}", hint="send uint8, or floats in [0, 1]", field=key)
    if not np.isfinite(pixels).all():
        raise RequestError(f"{key} contains a value that is not finite", hint="send pixels", field=key)
    return np.ascontiguousarray((255.0 * pixels).clip(0, 255).astype(np.uint8))


def _numbers(value: Any, key: str) -> list[float]:
    try:
        numbers = np.asarray(value, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{key} must contain numbers", str(error), "send floats", field=key) from error
    if not np.isfinite(numbers).all():
        raise RequestError(f"{key} contains a value that is not finite", hint="send finite numbers", field=key)
    return [float(number) for number in numbers]


def _required(message: Mapping[str, Any], key: str, hint: str) -> Any:
    if message.get(key) is None:
        raise RequestError(f"{key} is missing", hint=hint, field=key, code="missing_field")
    return message[key]


def _prompt(value: Any) -> str | None:
    """Return a text that was sent as str, bytes or a scalar array."""
    value = value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    if value is not None and not isinstance(value, str):
        raise RequestError("prompt must be a text", hint="send a text", field="prompt")
    return value
