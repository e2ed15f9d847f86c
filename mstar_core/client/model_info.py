"""ModelInfo: what a deployment says of the model that it serves. Made from the JSON of /v1/models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model. id: the deployment's name. root: its weights. parameters: JSON schema of what requests set."""

    id: str
    root: str = ""
    aliases: list[str] = field(default_factory=list)
    input_modalities: list[str] = field(default_factory=list)
    output_modalities: list[str] = field(default_factory=list)
    endpoints: list[str] = field(default_factory=list)
    max_model_len: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict, repr=False)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


def models_of(body: Mapping[str, Any]) -> list[ModelInfo]:
    """The models of an answer."""
    return [_model(card) for card in body.get("data") or []]


def _model(card: Mapping[str, Any]) -> ModelInfo:
    return ModelInfo(
        id=str(card["id"]),
        root=str(card.get("root") or ""),
        aliases=list(card.get("aliases") or []),
        input_modalities=list(card.get("input_modalities") or []),
        output_modalities=list(card.get("output_modalities") or []),
        endpoints=list(card.get("endpoints") or []),
        max_model_len=card.get("max_model_len"),
        parameters=card.get("parameters") or {},
        raw=card,
    )
