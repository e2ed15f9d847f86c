"""From the fields of a route to checked parameters: model name, extras, voice, number of answers. Used by routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mstar_core.api.call import Asked, Rules, check_model, check_params, drop_unsupported, openai_params
from mstar_core.api.exchange import Exchange
from mstar_core.errors import RequestError
from mstar_core.plugin.params import param_specs
from mstar_core.plugin.spec import ModelSpec


def model_names(exchange: Exchange) -> list[str]:
    """All names under which the one model may be asked for."""
    service = exchange.service
    weights = [ref.repo for ref in service.model.weights.values()]
    return list(dict.fromkeys([service.deployment.name, service.model.name, *service.model.aliases, *weights]))


def check_name(exchange: Exchange, asked: object) -> None:
    """Raise NotFound for another model's name, where the deployment is strict about it."""
    service = exchange.service
    check_model(service.model, model_names(exchange), asked, strict=service.deployment.api.strict_model)


def rules_of(exchange: Exchange, outputs: tuple[str, ...], request_id: str | None = None) -> Rules:
    """What the deployment and the exchange say about parameters. request_id: of one of several requests in it."""
    api = exchange.service.deployment.api
    return Rules(
        request_id=request_id or exchange.request_id, outputs=outputs, unknown=api.unknown_params,
        limit_s=api.timeout_s, header_s=exchange.timeout_header,
    )  # fmt: skip


def openai_asked(
    exchange: Exchange,
    rest: Mapping[str, Any],
    outputs: tuple[str, ...],
    offered: Mapping[str, Any] | None = None,
) -> Asked:
    """Parameters of an OpenAI route. rest: fields that the route does not read; offered: those that a model may map."""
    spec = exchange.service.model
    given = openai_params(spec, exchange.route, drop_unsupported(spec, rest), offered)
    return check_params(spec, given, rules_of(exchange, outputs))


def check_count(exchange: Exchange, count: int) -> int:
    """`n` of a request. Raises RequestError beyond the deployment's limit."""
    most = exchange.service.deployment.api.max_n
    if count > most:
        raise RequestError(f"n is {count}, allowed is 1 to {most}", field="n", value=count, allowed=f"1 to {most}")
    return count


def voice_of(spec: ModelSpec, voice: Any, field: str) -> str | None:
    """A voice by its name in any case, or as {id}; the model's parameter says which there are. Raises RequestError."""
    if isinstance(voice, dict):
        voice = voice.get("id")
        if voice is None:
            raise RequestError(f"{field} has no id", field=field)
    if voice is None:
        return None
    if not isinstance(voice, str):
        raise RequestError(f"{field} is neither a name nor an object with an id", field=field)
    known = next((p.choices for p in param_specs(spec.params) if "voice" in (p.name, p.openai)), ())
    return voice.lower() if voice not in known and voice.lower() in known else voice
