"""GET /v1/models and /v1/models/{id}: the served model and the schema of its parameters. Paths of mapped routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sanic.response import HTTPResponse

from mstar_core.api.http.exchange import Exchange
from mstar_core.api.parse.fields import model_names
from mstar_core.errors import NotFound, did_you_mean
from mstar_core.plugin.params import param_schema
from mstar_core.plugin.spec import ModelSpec


async def models(exchange: Exchange) -> HTTPResponse:
    """Return the model as a list of one."""
    return exchange.json({"object": "list", "data": [_card(exchange)]})


async def model(exchange: Exchange) -> HTTPResponse:
    """Return the model by any of its names."""
    name = exchange.path_name
    names = model_names(exchange)
    if name not in names:
        raise NotFound(
            f"the model {name[:80]!r} does not exist", hint=did_you_mean(name, names), code="model_not_found"
        )
    return exchange.json(_card(exchange))


def _card(exchange: Exchange) -> dict[str, Any]:
    service = exchange.service
    spec = service.model
    card: dict[str, Any] = {
        "id": service.deployment.name,
        "object": "model",
        "created": service.created,
        "owned_by": "mstar",
        "root": next((ref.repo for ref in spec.weights.values()), spec.name),
        "aliases": [name for name in model_names(exchange) if name != service.deployment.name],
        "input_modalities": [modality.kind for modality in spec.inputs],
        "output_modalities": [modality.kind for modality in spec.outputs],
        "endpoints": mapped_endpoints(spec),
        "max_model_len": service.deployment.max_seq_len,
        "parameters": param_schema(spec.params),
    }
    if "speech" in spec.routes:
        card["speech"] = "answer" if "chat" in spec.routes else "verbatim"
    if service.deployment.weights_source == "tiny" and spec.notice:
        card["notice"] = spec.notice
    return card


ENDPOINTS: Final[Mapping[str, str]] = {
    "chat": "/v1/chat/completions",
    "speech": "/v1/audio/speech",
    "image": "/v1/images/generations",
    "image_edit": "/v1/images/edits",
    "transcription": "/v1/audio/transcriptions",
    "robot_policy": "/v1/robot/policy",
}
"""Paths by mapping name."""


def mapped_endpoints(spec: ModelSpec) -> list[str]:
    """Return the paths of the inference routes that a model supports."""
    return ["/generate", *(path for name, path in ENDPOINTS.items() if name in spec.routes)]
