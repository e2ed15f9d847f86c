"""Paths of the routes that a model may map. Used by the route table, /v1/models and the refusal of other models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mstar_core.plugin.spec import ModelSpec

ENDPOINTS: Final[Mapping[str, str]] = {
    "chat": "/v1/chat/completions",
    "speech": "/v1/audio/speech",
    "image": "/v1/images/generations",
    "image_edit": "/v1/images/edits",
    "transcription": "/v1/audio/transcriptions",
    "robot_policy": "/v1/robot/policy",
}
"""Mapping -> path."""


def mapped_endpoints(spec: ModelSpec) -> list[str]:
    """The inference routes that a model serves."""
    return ["/generate", *(path for name, path in ENDPOINTS.items() if name in spec.routes)]
