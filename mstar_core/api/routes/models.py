"""GET /v1/models and /v1/models/{id}: what is served, with the schema of its parameters."""

from __future__ import annotations

from typing import Any

from sanic.response import HTTPResponse

from mstar_core.api.asking import model_names
from mstar_core.api.endpoints import mapped_endpoints
from mstar_core.api.exchange import Exchange
from mstar_core.errors import NotFound, did_you_mean
from mstar_core.plugin.params import param_schema


async def models(exchange: Exchange) -> HTTPResponse:
    """The one model, as a list."""
    return exchange.json({"object": "list", "data": [_card(exchange)]})


async def model(exchange: Exchange) -> HTTPResponse:
    """The model, under any of its names."""
    name = exchange.path_name
    names = model_names(exchange)
    if name not in names:
        raise NotFound(f"there is no model {name[:80]!r}", hint=did_you_mean(name, names), code="model_not_found")
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
