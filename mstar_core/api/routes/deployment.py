"""GET routes about the deployment: models, health, readiness, version, metrics and the API description."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from sanic.response import HTTPResponse

from mstar_core.api.api_metrics import CONTENT_TYPE
from mstar_core.api.exchange import Exchange
from mstar_core.api.link import CONDUCTOR, SLEEPING
from mstar_core.api.parse.capabilities import capabilities_of
from mstar_core.api.routes.fields import is_named, model_names, weight_names
from mstar_core.api.routes.sound.speech import speech_kind
from mstar_core.api.service import NO_RESUME
from mstar_core.config.deployment import AdapterPlan
from mstar_core.errors import NotFound, did_you_mean
from mstar_core.plugin.params import param_schema
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import Embedding, Video

PROXY_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._~%:-]{1,200}){1,8}")
"""Value of X-Forwarded-Prefix that the description repeats."""


async def models(exchange: Exchange) -> HTTPResponse:
    """Return the model, then the LoRA adapters that are loaded."""
    adapters = exchange.service.deployment.adapters
    cards = [_card(exchange), *(_adapter_card(exchange, adapter) for adapter in adapters)]
    return exchange.json({"object": "list", "data": cards})


async def model(exchange: Exchange) -> HTTPResponse:
    """Return the model by any of its names."""
    name = exchange.path_name
    adapters = {adapter.name: adapter for adapter in exchange.service.deployment.adapters}
    if name in adapters:
        return exchange.json(_adapter_card(exchange, adapters[name]))
    if not is_named(exchange, name):
        hint = did_you_mean(name, model_names(exchange))
        raise NotFound(f"the model {name[:80]!r} does not exist", hint=hint, code="model_not_found")
    return exchange.json(_card(exchange))


def _adapter_card(exchange: Exchange, adapter: AdapterPlan) -> dict[str, Any]:
    """Return the card of a LoRA adapter: that of its base model under its own name."""
    card = _card(exchange)
    return {**card, "id": adapter.name, "root": adapter.base or adapter.name, "parent": card["id"], "aliases": []}


def _card(exchange: Exchange) -> dict[str, Any]:
    service = exchange.service
    spec = service.model
    card: dict[str, Any] = {
        "id": service.deployment.name,
        "object": "model",
        "created": service.created,
        "owned_by": "mstar",
        "root": next(iter(weight_names(exchange)), spec.name),
        "aliases": [name for name in model_names(exchange) if name != service.deployment.name],
        "input_modalities": [modality.kind for modality in spec.inputs],
        "output_modalities": [modality.kind for modality in spec.outputs],
        "endpoints": mapped_endpoints(spec),
        "capabilities": capabilities_of(spec),
        "max_model_len": service.deployment.max_seq_len,
        "parameters": param_schema(spec.params),
        "unresumable": _unresumable(spec, is_off=not service.deployment.resume),
    }
    if isinstance(video := spec.input("video"), Video) and video.max_frames is not None:
        card["max_frames"] = video.max_frames
    if isinstance(vector := spec.output("embedding"), Embedding) and vector.dim is not None:
        card["dimensions"] = vector.dim
    if "speech" in spec.routes:
        card["speech"] = speech_kind(spec)
    if robot := spec.robot_facts():
        card["robot"] = robot
    if notice := spec.notice_of(service.deployment.weights_source):
        card["notice"] = notice
    if example := spec.prompt_of(service.deployment.weights_source):
        card["example"] = example
        card["example_params"] = dict(spec.mini_params)
    if world := spec.world_of(service.deployment.weights_source):
        card["world"] = world
    return card


def _unresumable(spec: ModelSpec, *, is_off: bool) -> list[dict[str, Any]]:
    """Return the requests that are not resumed. is_off: the deployment resumes none."""
    if is_off:
        return [{"reason": NO_RESUME, "params": {}}]
    return [{"reason": each.reason, "params": dict(each.params)} for each in spec.unresumable]


ENDPOINTS: Final[Mapping[str, str]] = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "completion": "/v1/completions",
    "embedding": "/v1/embeddings",
    "tokenize": "/tokenize",
    "speech": "/v1/audio/speech",
    "image": "/v1/images/generations",
    "image_edit": "/v1/images/edits",
    "transcription": "/v1/audio/transcriptions",
    "video": "/v1/videos",
    "translation": "/v1/audio/translations",
    "robot_policy": "/v1/robot/policy",
    "realtime": "/v1/realtime",
}
"""Paths of inference routes by name."""

SHARED: Final[Mapping[str, tuple[str, ...]]] = {"responses": ("chat",), "realtime": ("chat", "speech")}
"""Mappings of a model by each of which another route is offered too."""


def mapped_endpoints(spec: ModelSpec) -> list[str]:
    """Return the paths of the inference routes that a model supports."""
    offered = (path for name, path in ENDPOINTS.items() if spec.routes.intersection(SHARED.get(name, (name,))))
    return ["/generate", *offered]


API_VERSION = 1


async def health(exchange: Exchange) -> HTTPResponse:
    """Return whether every process is alive."""
    deployment = exchange.service.link.deployment
    gone = next(iter(deployment.down.values()), None)
    if deployment.state == "unhealthy" or gone is not None:
        name, reason = (gone.name, gone.public) if gone else ("deployment", deployment.reason or "unhealthy")
        exchange.code = "unhealthy"
        component = name.partition("-")[0]  # the kind: which process of a group died is for its operator
        return exchange.json({"status": "unhealthy", "component": component, "reason": reason}, 503)
    if deployment.is_draining:
        return exchange.json({"status": "draining", "phase": deployment.phase})
    if deployment.state in ("ready", SLEEPING) and CONDUCTOR in deployment.up:
        return exchange.json({"status": "healthy"})
    return exchange.json({"status": "starting", "phase": deployment.phase})


async def ready(exchange: Exchange) -> HTTPResponse:
    """Return whether a request would be accepted now: also by a deployment that sleeps, if requests wake it."""
    problem = exchange.service.link.deployment.problem()
    if problem is None and exchange.service.link.deployment.state == SLEEPING:
        message = "the next request wakes the deployment and waits for that"
        name = exchange.service.deployment.name
        return exchange.json({"status": SLEEPING, "model": name, "message": message})
    if problem is None:
        answer: dict[str, Any] = {"status": "ready", "model": exchange.service.deployment.name}
        captures = exchange.service.metrics.captures()
        return exchange.json(answer | ({"captures": captures} if captures else {}))
    exchange.code = problem.code
    deployment = exchange.service.link.deployment
    body: dict[str, Any] = {"status": "unavailable", "reason": problem.code, "message": problem.public}
    if problem.code == "starting":
        body |= {"phase": deployment.phase, "progress": deployment.reason}
    return exchange.json(body, 503, {"Retry-After": "2"})


async def version(exchange: Exchange) -> HTTPResponse:
    """Return the versions of the server, the model and its plugin."""
    service = exchange.service
    versions = service.deployment.versions
    distribution = next((name for name in versions if name != "mstarctl"), "")
    return exchange.json(
        {
            "version": versions.get("mstarctl", "0"),
            "api": API_VERSION,
            "model": service.model.name,
            "plugin": {
                "name": service.deployment.plugin,
                "distribution": distribution,
                "version": versions.get(distribution, "0"),
            },
            "started_at": service.created,
        }
    )


async def metrics(exchange: Exchange) -> HTTPResponse:
    """Return the metrics in the Prometheus text format."""
    return exchange.whole(exchange.service.metrics.text(), CONTENT_TYPE)


async def openapi_document(exchange: Exchange) -> HTTPResponse:
    """Return the OpenAPI description, with the beginning of paths that a proxy has taken off."""
    prefix = exchange.header("x-forwarded-prefix") or ""
    servers = {"servers": [{"url": prefix}]} if PROXY_PREFIX.fullmatch(prefix) else {}
    return exchange.json({**exchange.service.description, **servers})
