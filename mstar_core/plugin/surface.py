"""How a model serves one of the routes that it maps: what is asked of it there. Written by plugins, read by the api."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

ROUTES: Final = ("chat", "speech", "image", "image_edit", "transcription", "robot_policy")
"""Routes of the api that a model may map."""

ROUTE_OUTPUTS: Final[Mapping[str, str]] = {
    "chat": "text",
    "speech": "audio",
    "image": "image",
    "image_edit": "image",
    "transcription": "text",
    "robot_policy": "action",
}
"""What a route answers with; a model that maps the route has that output."""

ROUTE_INPUTS: Final[Mapping[str, tuple[str, ...]]] = {
    "chat": ("text",),
    "speech": ("text",),
    "image": ("text",),
    "image_edit": ("image", "text"),
    "transcription": ("audio",),
    "robot_policy": ("image",),
}
"""What a route sends; a model that maps the route reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """One route of a model, where it needs more than the route's name.

    params: parameter values that hold on this route unless the client sends others. beside: further outputs that are
    asked for, shown where the route has a place for them (a thought beside an image). instruction: the text that goes
    with the sound on `transcription`; `{language}` stands for the language, and without one the words of
    `instruction_without_language` are sent. metadata: what a client of `robot_policy` is told when it connects: texts,
    numbers, lists and maps of them.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    instruction: str = ""
    instruction_without_language: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
