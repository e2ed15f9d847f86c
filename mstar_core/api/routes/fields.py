"""Typed fields of a request body, and the model parameters among them. Used by routes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect

from mstar_core.api.errors import UnsupportedType
from mstar_core.api.exchange import Exchange
from mstar_core.api.http.body import UploadedFile, read_form, read_json
from mstar_core.api.http.strict_json import parse_json
from mstar_core.api.parse.params import (
    ParamRules,
    RequestParams,
    check_params,
    drop_unsupported,
    openai_params,
)
from mstar_core.api.requests.registry import check_request_id
from mstar_core.errors import NotFound, RequestError, did_you_mean
from mstar_core.plugin.params import param_specs, parse_bool
from mstar_core.plugin.spec import ModelSpec

T = TypeVar("T", bound=msgspec.Struct)

HEADERS: Final = {"timeout_s": "x-request-timeout", "period_ms": "x-period-ms", "skipped_ticks": "x-skipped-ticks"}
"""Headers that set a parameter which the body does not give."""

_PLACE = re.compile(r" - at `\$\.?(?P<path>.*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")


async def read_body(
    exchange: Exchange, kind: type[T], prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
) -> tuple[T, dict[str, Any]]:
    """Check that a request is accepted. Return its JSON body as `kind`, and its remaining fields.

    prepare: applied to the body before its types are checked. Takes its request id.

    Raises Unavailable, Overloaded, RequestError, UnsupportedType.
    """
    exchange.check_open()
    content_type = exchange.content_type.partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise UnsupportedType("the body must be JSON", hint="send application/json")
    fields: Mapping[str, Any] = await read_json(exchange, exchange.limits)
    body = typed(fields if prepare is None else prepare(fields), kind)
    exchange.take_body_id(fields.get("request_id"))
    return body


async def read_multipart(exchange: Exchange, kind: type[T]) -> tuple[T, dict[str, Any], list[UploadedFile]]:
    """Return a multipart body as `read_body` does, and its files. Remaining fields are read as JSON if they are.

    Raises like `read_body`, and TooLarge.
    """
    exchange.check_open()
    if exchange.content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        raise UnsupportedType("the body must be a form", hint="send multipart/form-data")
    form = await read_form(exchange, exchange.content_type, exchange.limits)
    exchange.take_body_id(form.fields.get("request_id"))
    body, rest = typed(form.fields, kind)
    return body, {name: json_or_text(value) for name, value in rest.items()}, form.files


def typed(body: Mapping[str, Any], kind: type[T]) -> tuple[T, dict[str, Any]]:
    """Return `body` as `kind`, and its other fields. Null means absent; numbers may be text. Raises RequestError."""
    names = {field.encode_name: field.type for field in _struct(kind).fields}
    sent = {name: value for name, value in body.items() if value is not None}
    declared = {name: _boolean(value, names[name]) for name, value in sent.items() if name in names}
    try:
        parsed = msgspec.convert(declared, kind, strict=False)
    except msgspec.ValidationError as error:
        raise refused(str(error), kind) from error
    return parsed, {name: value for name, value in sent.items() if name not in names}


def _boolean(value: Any, kind: inspect.Type) -> Any:
    plain = kind.type if isinstance(kind, inspect.Metadata) else kind
    flag = parse_bool(value) if isinstance(plain, inspect.BoolType) and isinstance(value, str) else None
    return value if flag is None else flag


def refused(text: str, kind: type[msgspec.Struct]) -> RequestError:
    """Return the error for a body that is not a `kind`. text: of msgspec's error."""
    place = _PLACE.search(text)
    path = place["path"] if place is not None else ""
    missing = _MISSING.search(text)
    if missing is not None:
        field = f"{path}.{missing['name']}".lstrip(".")
        return RequestError(f"{field} is missing", field=field, code="missing_field")
    what = _PLACE.sub("", text).replace("`", "")
    allowed = ", ".join(_choices(_struct(kind), path))
    return RequestError(
        f"{path or 'the body'} is not valid: {what[:200]}",
        hint=f"allowed: {allowed}" if allowed else "",
        field=path or None,
        **({"allowed": allowed} if allowed else {}),
    )


def _choices(kind: inspect.Type, path: str) -> Sequence[str]:
    """Return the allowed values at `path`; empty if they are not enumerated."""
    kinds = list(_alternatives(kind))
    for step in re.findall(r"[^.\[\]]+|\[[^\]]*\]", path):
        kinds = [leaf for outer in kinds for inner in _inside(outer, step) for leaf in _alternatives(inner)]
    return [str(value) for leaf in kinds if isinstance(leaf, inspect.LiteralType) for value in leaf.values]


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    match kind:
        case inspect.Metadata():
            yield from _alternatives(kind.type)
        case inspect.UnionType():
            for inner in kind.types:
                yield from _alternatives(inner)
        case _:
            yield kind


def _inside(kind: inspect.Type, step: str) -> list[inspect.Type]:
    match kind:
        case inspect.ListType() if step.startswith("["):
            return [kind.item_type]
        case inspect.StructType():
            tag = [inspect.LiteralType((str(kind.tag),))] if step == kind.tag_field else []
            return [*tag, *(field.type for field in kind.fields if field.encode_name == step)]
        case _:
            return []


@functools.cache
def _struct(kind: type[msgspec.Struct]) -> inspect.StructType:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info


ANY_NAME: Final = "*"
"""Alias of a deployment that answers to every model name."""


def model_names(exchange: Exchange) -> list[str]:
    """Return all names of the served model, without `ANY_NAME`."""
    service = exchange.service
    own = [service.deployment.name, *service.deployment.api.aliases]
    names = dict.fromkeys([*own, service.model.name, *service.model.aliases, *weight_names(exchange)])
    return [name for name in names if name != ANY_NAME]


def weight_names(exchange: Exchange) -> list[str]:
    """Return the names of the served weights: repositories of the hub, a folder's name, or `MODEL:tiny`."""
    spec, deployment = exchange.service.model, exchange.service.deployment
    match deployment.weights_source:
        case "official":
            return [ref.repo for ref in spec.weights.values()]
        case "folder":
            return [_folder_name(Path(deployment.folder))] if deployment.folder else []
        case variant:
            return [f"{spec.name}:{variant}"]


def _folder_name(folder: Path) -> str:
    """Return the last part of a path; the repository for a folder in the cache of the hub."""
    kind, *repo = folder.parent.parent.name.split("--")
    return "/".join(repo) if kind == "models" and folder.parent.name == "snapshots" else folder.name


def is_named(exchange: Exchange, name: str) -> bool:
    """Return whether the served model has this name."""
    return ANY_NAME in exchange.service.deployment.api.aliases or name in model_names(exchange)


def answered_name(exchange: Exchange, requested: str | None) -> str:
    """Return the name of the model in an answer: the requested one if the model has it, else the deployment's."""
    if requested is not None and (exchange.adapter or is_named(exchange, requested)):
        return requested
    return exchange.served_name


def check_name(exchange: Exchange, requested: object) -> None:
    """Check the model's name, and choose the LoRA adapter of that name.

    Raises NotFound for the name of another model if the deployment is strict or has room for adapters, because the base
    model must not answer for an adapter that is not loaded; RequestError for other types.
    """
    service = exchange.service
    if requested is None:
        return
    if not isinstance(requested, str):
        raise RequestError("model must be a string", field="model")
    adapters = {adapter.name: adapter.number for adapter in service.deployment.adapters}
    if requested in adapters:
        exchange.adapter = adapters[requested]
        return
    is_strict = service.deployment.api.strict_model or bool(service.deployment.lora.max_adapters)
    if is_strict and not is_named(exchange, requested):
        raise NotFound(
            f"the model {requested[:80]!r} does not exist",
            hint=did_you_mean(requested, [*model_names(exchange), *adapters]),
            code="model_not_found",
            field="model",
        )


def check_session(session_id: object) -> str:
    """Return the client's id of a session, empty without one. Raises RequestError."""
    if session_id is None:
        return ""
    if not isinstance(session_id, str):
        raise RequestError("session_id must be a string", field="session_id")
    return check_request_id(session_id, "session_id")


def rules_of(exchange: Exchange, outputs: tuple[str, ...], request_id: str | None = None) -> ParamRules:
    """Return the parameter rules of the deployment and the request. request_id: of a request within a connection."""
    api = exchange.service.deployment.api
    return ParamRules(
        request_id=request_id or exchange.request_id,
        outputs=outputs,
        unknown=api.unknown_params,
        limit_s=api.timeout_s,
        headers={name: exchange.header(header) for name, header in HEADERS.items()},
    )


def openai_parsed(
    exchange: Exchange,
    rest: Mapping[str, Any],
    outputs: tuple[str, ...],
    offered: Mapping[str, Any] | None = None,
    route: str | None = None,
) -> RequestParams:
    """Validate the parameters of an OpenAI route. rest: fields that the route does not read; offered: mapped if
    possible. route: the mapping of the model that applies, by default that of the route's name.
    """
    spec = exchange.service.model
    values = openai_params(spec, route or exchange.route, drop_unsupported(spec, rest), offered)
    return check_params(spec, values, rules_of(exchange, outputs))


def check_count(exchange: Exchange, count: int) -> int:
    """Return `n`. Raises RequestError if it exceeds the deployment's limit."""
    most = exchange.service.deployment.api.max_n
    if count > most:
        raise RequestError(f"n is {count}, but must be 1 to {most}", field="n", value=count, allowed=f"1 to {most}")
    return count


def voice_of(spec: ModelSpec, voice: Any, field: str) -> str | None:
    """Return a voice, given as a name in any case or as {id}. Raises RequestError."""
    if isinstance(voice, dict):
        voice = voice.get("id")
        if voice is None:
            raise RequestError(f"{field} has no id", field=field)
    if voice is None:
        return None
    if not isinstance(voice, str):
        raise RequestError(f"{field} must be a name or an object with an id", field=field)
    known = next((p.choices for p in param_specs(spec.params) if "voice" in (p.name, p.openai)), ())
    return voice.lower() if voice not in known and voice.lower() in known else voice


def json_or_text(value: Any) -> Any:
    """Return a form field as JSON if it parses as such, otherwise as text."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except RequestError:
        return value
