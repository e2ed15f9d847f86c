"""A request after its words were checked: parameters, modalities, seed, deadline. Made by routes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.api.errors import UnsupportedType
from mstar_core.api.ids import check_seed, seed_of
from mstar_core.errors import NotFound, RequestError, did_you_mean
from mstar_core.plugin.modality import MODALITY_NAMES
from mstar_core.plugin.params import LENGTH_NAMES, param_specs, parse_params
from mstar_core.plugin.processor import MediaPart
from mstar_core.plugin.spec import ModelSpec

SILENT: Final = frozenset(
    (
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
        "quality", "style", "background", "moderation",
    )
)  # fmt: skip
"""OpenAI fields without effect here; accepted and dropped."""

MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 256
MAX_INT: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is asked for. params: the model's checked dataclass. order: segments as (modality, index)."""

    request_id: str
    route: str
    text: str | None
    media: Sequence[MediaPart] = ()
    order: Sequence[tuple[str, int]] = ()
    outputs: tuple[str, ...]
    params: Any
    seed: int
    timeout_s: float
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Parameters as a route collected them, before they are checked."""

    params: Any
    seed: int
    timeout_s: float
    warnings: tuple[str, ...]


def check_params(
    spec: ModelSpec, given: Mapping[str, Any], *, request_id: str, unknown: str, limit_s: float, header_s: str | None
) -> Asked:
    """Check `given` against the model's parameters and the common names. Raises RequestError naming the field."""
    rest = {name: value for name, value in given.items() if value is not None}
    own_seed = any(spec_name == "seed" for spec_name in _names(spec))
    seed = check_seed(rest["seed"]) if "seed" in rest else seed_of(request_id)
    if not own_seed:
        rest.pop("seed", None)
    if "stop" in rest:
        check_stop(rest["stop"])
    for name, value in rest.items():
        _check_size(name, value)
    parsed = parse_params(spec.params, rest, unknown=unknown)
    params = parsed.params
    if own_seed and params.seed is None:
        params = dataclasses.replace(params, seed=seed)
    timeout_s, warning = _timeout(parsed.common.get("timeout_s", header_s), limit_s)
    if "priority" in parsed.common:
        _number("priority", parsed.common["priority"])
    warnings = (*parsed.warnings, *((warning,) if warning else ()))
    return Asked(params=params, seed=seed, timeout_s=timeout_s, warnings=warnings)


def _names(spec: ModelSpec) -> list[str]:
    return [param.name for param in param_specs(spec.params)]


def openai_params(spec: ModelSpec, route: str, body: Mapping[str, Any], own: frozenset[str]) -> dict[str, Any]:
    """Model parameters out of an OpenAI body; `own`: fields that the route itself reads.

    A field that a parameter maps (`openai="voice"`, or `"speech:voice"` for one route) gives its value; a field under
    the parameter's own name wins over it.
    """
    mapped: dict[str, str] = {}
    for param in param_specs(spec.params):
        scope, _, field = (param.openai or "").rpartition(":")
        if field and field not in LENGTH_NAMES and scope in ("", route) and (field not in mapped or scope):
            mapped[field] = param.name
    given: dict[str, Any] = {}
    names = set(_names(spec))
    for name, value in body.items():
        if name in SILENT or value is None:
            continue
        if name in mapped:
            given.setdefault(mapped[name], value)
        elif name not in own:
            given[name] = value
    direct = {name: body[name] for name in names if body.get(name) is not None and mapped.get(name, name) == name}
    return {**given, **direct}


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise RequestError for OpenAI fields whose effect this server would not deliver."""
    response_format = body.get("response_format")
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    refused = {
        "tools": bool(body.get("tools")),
        "logprobs": bool(body.get("logprobs")),
        "response_format": kind not in (None, "text"),
        "presence_penalty": body.get("presence_penalty") not in (None, 0),
        "frequency_penalty": body.get("frequency_penalty") not in (None, 0),
        "logit_bias": bool(body.get("logit_bias")),
        "speed": body.get("speed") not in (None, 1),
    }
    for name, is_asked in refused.items():
        if is_asked:
            raise RequestError(
                f"{name} is not supported", hint="leave it out", field=name, code="unsupported_parameter"
            )


def check_model(spec: ModelSpec, names: Sequence[str], asked: object, *, strict: bool) -> None:
    """Raise NotFound for another model's name, when that is asked for strictly; RequestError for what is no name."""
    if asked is None:
        return
    if not isinstance(asked, str):
        raise RequestError("model is not a string", field="model")
    if strict and asked not in names:
        raise NotFound(
            f"there is no model {asked[:80]!r}", hint=did_you_mean(asked, names), code="model_not_found", field="model"
        )


def check_outputs(spec: ModelSpec, asked: Sequence[str] | None) -> tuple[str, ...]:
    """The output modalities; by default text, or the model's first where it gives no text. Raises RequestError."""
    offered = [modality.kind for modality in spec.outputs]
    if not asked:
        return ("text",) if "text" in offered else (offered[0],)
    for name in asked:
        if name not in offered:
            known = name in MODALITY_NAMES
            title = f"the model does not give {name}" if known else f"there is no modality {name[:40]!r}"
            hint = f"it gives {', '.join(offered)}" if known else did_you_mean(name, MODALITY_NAMES)
            raise RequestError(title, hint=hint, field="output_modalities", code="unknown_modality")
    return tuple(dict.fromkeys(asked))


def check_order(
    spec: ModelSpec, asked: Sequence[str] | None, text: str | None, media: Sequence[MediaPart]
) -> list[tuple[str, int]]:
    """The segments in the order in which the model reads them: (modality, index within it). Raises RequestError."""
    offered = {modality.kind for modality in spec.inputs}
    counts: dict[str, int] = {}
    for part in media:
        if part.modality not in offered:
            raise UnsupportedType(
                f"the model does not read {part.modality}", hint=f"it reads {', '.join(sorted(offered))}",
                field="files", code="unsupported_media_type",
            )  # fmt: skip
        counts[part.modality] = counts.get(part.modality, 0) + 1
    if asked is None:
        seen: dict[str, int] = {}
        order = []
        for part in media:
            order.append((part.modality, seen.get(part.modality, 0)))
            seen[part.modality] = seen.get(part.modality, 0) + 1
        return [*order, ("text", 0)] if text else order
    return _asked_order(asked, offered, counts, text)


def _asked_order(
    asked: Sequence[str], offered: set[str], counts: Mapping[str, int], text: str | None
) -> list[tuple[str, int]]:
    order: list[tuple[str, int]] = []
    for name in dict.fromkeys(asked):
        if name not in offered:
            hint = f"it reads {', '.join(sorted(offered))}"
            raise RequestError(
                f"the model does not read {name[:40]}", hint=hint, field="input_modalities", code="unknown_modality"
            )
        have = (1 if text is not None else 0) if name == "text" else counts.get(name, 0)
        named = asked.count(name)
        if named not in (1, have) or not have:
            raise RequestError(
                f"input_modalities names {name} {named} times, the request has {have}", field="input_modalities"
            )
    for name in counts:
        if name not in asked:
            raise RequestError(f"input_modalities leaves out {name}", field="input_modalities")
    seen: dict[str, int] = {}
    for name in asked:
        have = 1 if name == "text" else counts[name]
        times = have if asked.count(name) == 1 else 1
        for _ in range(times):
            order.append((name, seen.get(name, 0)))
            seen[name] = seen.get(name, 0) + 1
    return order


def check_stop(value: Any) -> None:
    """Raise RequestError unless `stop` is one string or up to four of 1 to 256 characters."""
    items = [value] if isinstance(value, str) else value
    allowed = f"one string or up to {MAX_STOPS} of 1 to {MAX_STOP_CHARS} characters"
    if not isinstance(items, list) or len(items) > MAX_STOPS:
        raise RequestError(f"stop is not {allowed}", field="stop", allowed=allowed)
    if not all(isinstance(item, str) and 1 <= len(item) <= MAX_STOP_CHARS for item in items):
        raise RequestError(f"stop is not {allowed}", field="stop", allowed=allowed)


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, int) and not -MAX_INT <= value <= MAX_INT:
        raise RequestError(f"{name[:40]} is a number with too many digits", field=name[:40])
    if isinstance(value, str) and len(value) > 400 and value.strip("+- \t").isdigit():
        raise RequestError(f"{name[:40]} is a number with too many digits", field=name[:40])
    if isinstance(value, list):
        for item in value:
            _check_size(name, item)


def _timeout(value: Any, limit_s: float) -> tuple[float, str | None]:
    if value is None:
        return limit_s, None
    number = _number("timeout_s", value)
    if number <= 0:
        raise RequestError(f"timeout_s is {number:g}, allowed is > 0", field="timeout_s", allowed="> 0")
    if number > limit_s:
        return limit_s, f"timeout_s was lowered to the server's limit of {limit_s:g}"
    return number, None


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RequestError(f"{name} is not a finite number", field=name)
    return number
