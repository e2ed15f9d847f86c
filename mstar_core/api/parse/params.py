"""Validation of requests against the model: parameters, modalities, order, seed, deadline. Used by routes."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from mstar_core.api.errors import UnsupportedType
from mstar_core.api.parse.prompts import RawPrompt
from mstar_core.api.parse.tools import ChatOptions
from mstar_core.api.requests.registry import check_seed, seed_of
from mstar_core.errors import RequestError, did_you_mean
from mstar_core.graph.declare.sampling import ADJUSTING, BIAS, check_biased
from mstar_core.plugin.chat.turns import Turn
from mstar_core.plugin.params import LENGTH_NAMES, param_specs, parse_params
from mstar_core.plugin.processor import MediaPart
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import MODALITY_NAMES

SILENT: Final = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
        "quality",
        "style",
        "background",
        "moderation",
    )
)
"""OpenAI fields that are accepted without effect."""

LEAST_TEMPERATURE: Final = 1e-5
MIN_PERIOD_MS: Final = 0.01
"""Shortest period of a control loop. Counts of ticks stay finite."""

MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 256
MAX_INT: Final = 2**63 - 1

P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLoop:
    """A control loop as its client describes it. skipped_ticks: without a request since its previous one."""

    period_ms: float
    skipped_ticks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveText:
    """A text that arrives while it is read, as ids. first: those that are known; more: the next ones, to its end."""

    first: Sequence[int]
    more: AsyncIterator[Sequence[int]]

    async def with_ids(self, count: int) -> LiveText:
        """Wait until at least `count` ids are known or the text has ended. Returns the text with them as the first."""
        first = list(self.first)
        while len(first) < count and (ids := await anext(self.more, None)) is not None:
            first += ids
        return dataclasses.replace(self, first=first)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A validated request. params: the model's dataclass. order: segments as (modality, index).

    texts, turns, chat: chat only. raw: a prompt without a template; its text is `text`. observation: a robot message,
    in place of text and media. stops: stop strings. group: the client's id if this is one item of several. loop: the
    client's control loop, None if it names none. session: the client's id of its session, empty without one.
    reads_only: the request has no output; it reads its prompt into the caches, under the lease of its session.
    reads_windows: see `PromptRequest`. live: its text, in place of `text`, for a model whose text input grows.
    parent: id of the HTTP request that began it and does not wait for it. is_heard: its sound goes to the client while
    it is made, so that pauses are heard.
    """

    request_id: str
    route: str
    text: str | None
    texts: Sequence[str] = ()
    turns: Sequence[Turn] = ()
    chat: ChatOptions = field(default_factory=ChatOptions)
    raw: RawPrompt | None = None
    stops: tuple[str, ...] = ()
    group: str = ""
    parent: str = ""
    media: Sequence[MediaPart] = ()
    order: Sequence[tuple[str, int]] = ()
    observation: bytes | None = None
    outputs: tuple[str, ...]
    params: Any
    seed: int
    timeout_s: float
    loop: ControlLoop | None = None
    session: str = ""
    reads_only: bool = False
    reads_windows: bool = False
    live: LiveText | None = None
    is_heard: bool = True
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """Validated parameters of a request."""

    params: Any
    seed: int
    timeout_s: float
    warnings: tuple[str, ...]
    stops: tuple[str, ...] = ()
    loop: ControlLoop | None = None

    def request(
        self,
        request_id: str,
        route: str,
        *,
        outputs: tuple[str, ...],
        text: str | None = None,
        media: Sequence[MediaPart] = (),
        order: Sequence[tuple[str, int]] = (),
    ) -> ParsedRequest:
        """Return a request with these parameters. Routes set the fields of their own by `dataclasses.replace`."""
        return ParsedRequest(
            request_id=request_id,
            route=route,
            text=text,
            media=media,
            order=order,
            outputs=outputs,
            params=self.params,
            seed=self.seed,
            timeout_s=self.timeout_s,
            stops=self.stops,
            loop=self.loop,
            warnings=self.warnings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRules:
    """Settings for the validation of parameters. outputs: requested modalities; unknown: policy for unknown names.

    headers: values of parameters that the request's headers give.
    """

    request_id: str
    outputs: tuple[str, ...]
    unknown: str
    limit_s: float
    headers: Mapping[str, str | None] = field(default_factory=dict)


def check_params(spec: ModelSpec, sent: Mapping[str, Any], rules: ParamRules) -> RequestParams:
    """Validate `given` against the model's parameters and the common names. Raises RequestError with the field name."""
    rest = {name: value for name, value in sent.items() if value is not None}
    request_id = rules.request_id
    own_seed = any(spec_name == "seed" for spec_name in _names(spec))
    seed = check_seed(rest["seed"]) if "seed" in rest else seed_of(request_id)
    if not own_seed:
        rest.pop("seed", None)
    stops, notes = take_stops(spec, rest, rules.outputs)
    for name, value in rest.items():
        _check_size(name, value)
    parsed = parse_params(spec.params, rest, unknown=rules.unknown)
    params = parsed.params
    if own_seed and params.seed is None:
        params = dataclasses.replace(params, seed=seed)
    _check_temperatures(params)
    _check_biases(spec, params)
    common = {**{name: value for name, value in rules.headers.items() if value is not None}, **parsed.common}
    timeout_s, warning = _timeout(common.get("timeout_s"), rules.limit_s)
    if "priority" in parsed.common:
        _number("priority", parsed.common["priority"])
    warnings = (*parsed.warnings, *notes, *((warning,) if warning else ()))
    return RequestParams(
        params=params, seed=seed, timeout_s=timeout_s, warnings=warnings, stops=stops, loop=_loop(common)
    )


def constrained(params: P, constraint: str) -> P:
    """Return a model's parameters with a grammar of the answer.

    Raises RequestError if the answer goes on behind its end.
    """
    if getattr(params, "ignore_eos", False):
        hint = "omit it, or what needs a grammar: response_format, grammar, regex, choice, tool_choice, strict"
        raise RequestError("ignore_eos contradicts a grammar of the answer", hint=hint, field="ignore_eos")
    return dataclasses.replace(params, constraint=constraint)  # type: ignore[type-var]


def _check_temperatures(params: Any) -> None:
    """Refuse temperatures that are not zero but so small that logits divided by them are infinite."""
    for item in dataclasses.fields(params):
        value = getattr(params, item.name)
        if item.name.endswith("temperature") and isinstance(value, float) and 0 < value < LEAST_TEMPERATURE:
            allowed = f"0 (greedy), or at least {LEAST_TEMPERATURE:g}"
            raise RequestError(f"{item.name} is {value:g}", hint=f"use {allowed}", field=item.name, allowed=allowed)


def _check_biases(spec: ModelSpec, params: Any) -> None:
    """Refuse biases of ids that a node which declares its vocabulary does not have."""
    for node in spec.nodes:
        if node.sampling is not None and node.sampling.vocab:
            name = node.sampling.prefix + BIAS
            check_biased(getattr(params, name, None), node.sampling.vocab, name)


def _names(spec: ModelSpec) -> list[str]:
    return [param.name for param in param_specs(spec.params)]


def openai_params(
    spec: ModelSpec, route: str, rest: Mapping[str, Any], offered: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the model parameters of an OpenAI body, from the fields that its route does not read itself.

    A parameter takes the value of the field it maps (`openai="voice"`, or `"speech:voice"` for one route). A field with
    the parameter's own name wins. offered: fields used only if a parameter maps them. Defaults of the model's surface
    apply to parameters that the client does not set.
    """
    parameters = {name: param.name for param in param_specs(spec.params) for name in (param.name, *param.aliases)}
    mapped = mapped_fields(spec, route)
    body = {**rest, **{name: value for name, value in (offered or {}).items() if name in mapped}}
    values: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or (name in SILENT and name not in parameters and name not in mapped):
            continue
        if name in mapped:
            values.setdefault(mapped[name], value)
        else:
            values[name] = value
    direct = {name: rest[name] for name in parameters if rest.get(name) is not None and mapped.get(name, name) == name}
    requested = {**values, **direct}
    spoken = {parameters.get(name, name) for name in requested}
    return {**{name: v for name, v in spec.surface(route).params.items() if name not in spoken}, **requested}


def mapped_fields(spec: ModelSpec, route: str) -> dict[str, str]:
    """Return the parameter that each mapped OpenAI field of a route sets."""
    mapped: dict[str, str] = {}
    for param in param_specs(spec.params):
        scope, _, field = (param.openai or "").rpartition(":")
        if field and field not in LENGTH_NAMES and scope in ("", route) and (field not in mapped or scope):
            mapped[field] = param.name
    return mapped


NO_EFFECT: Final[Mapping[str, tuple[Any, ...]]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "reasoning_effort": ("none",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logprobs": (False,),
    "top_logprobs": (0,),
    **{name: ({},) if name == BIAS else (0,) for name in ADJUSTING},
    "speed": (1,),
    "stream": (False,),
    "partial_images": (0,),
}
"""OpenAI fields that are not supported, and their values without effect, which are accepted."""


def drop_unsupported(spec: ModelSpec, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields without those of NO_EFFECT, unless the model has a parameter of that name.

    Raises RequestError (`unsupported_parameter`) for a value that has an effect.
    """
    parameters = {name for param in param_specs(spec.params) for name in (param.name, *param.aliases)}
    for name, harmless in NO_EFFECT.items():
        if name in rest and name not in parameters and not _is_one_of(rest[name], harmless):
            raise RequestError(f"{name} is not supported", hint="omit it", field=name, code="unsupported_parameter")
    return {name: value for name, value in rest.items() if name in parameters or name not in NO_EFFECT}


def _is_one_of(value: object, values: Sequence[object]) -> bool:
    """Return whether a JSON value is one of these. Unlike Python, JSON has no equality of 0 and false."""
    return any(isinstance(value, bool) is isinstance(each, bool) and value == each for each in values)


def check_outputs(
    spec: ModelSpec, requested: Sequence[str] | None, field: str = "output_modalities"
) -> tuple[str, ...]:
    """Return the output modalities; default: text, or the model's first. Raises RequestError."""
    offered = [modality.kind for modality in spec.outputs]
    if not requested:
        return ("text",) if "text" in offered else (offered[0],)
    for name in requested:
        if name not in offered:
            known = name in MODALITY_NAMES
            title = f"the model does not generate {name}" if known else f"the modality {name[:40]!r} does not exist"
            hint = f"supported: {', '.join(offered)}" if known else did_you_mean(name, MODALITY_NAMES)
            raise RequestError(title, hint=hint, field=field, code="unknown_modality")
    return tuple(dict.fromkeys(requested))


def check_order(
    spec: ModelSpec, requested: Sequence[str] | None, text: str | None, media: Sequence[MediaPart]
) -> list[tuple[str, int]]:
    """Return the input segments in order, as (modality, index within it). Raises RequestError."""
    offered = {modality.kind for modality in spec.inputs}
    accepted = f"accepted: {', '.join(sorted(offered))}"
    counts = Counter(part.modality for part in media)
    for name in counts:
        if name not in offered:
            raise UnsupportedType(
                f"the model does not accept {name}", hint=accepted, field="files", code="unsupported_media_type"
            )
    check_images(spec, counts["image"])
    if requested is None:
        return [*count_order([part.modality for part in media]), *([("text", 0)] if text else [])]
    counts["text"] = 0 if text is None else 1
    names: list[str] = []
    for name in requested:
        times, count = requested.count(name), counts[name]
        if name not in offered:
            raise RequestError(
                f"the model does not accept {name[:40]}",
                hint=accepted,
                field="input_modalities",
                code="unknown_modality",
            )
        if times not in (1, count) or not count:
            raise RequestError(
                f"input_modalities names {name} {times} times, but the request has {count}", field="input_modalities"
            )
        names += [name] * (count if times == 1 else 1)
    for part in media:
        if part.modality not in requested:
            raise RequestError(f"input_modalities omits {part.modality}", field="input_modalities")
    return count_order(names)


def count_order(kinds: Sequence[str]) -> list[tuple[str, int]]:
    """Return (modality, index within it) of each part, in order."""
    seen: Counter[str] = Counter()
    order = []
    for kind in kinds:
        order.append((kind, seen[kind]))
        seen[kind] += 1
    return order


def check_images(spec: ModelSpec, count: int, field: str = "files") -> None:
    """Raise RequestError for too many images, before any is decoded."""
    most = getattr(spec.input("image"), "max_count", None)
    if most is not None and count > most:
        raise RequestError(
            f"the request has {count} images, but {spec.name} accepts at most {most}",
            hint="send fewer images",
            field=field,
            value=count,
            allowed=f"<= {most}",
        )


def take_stops(
    spec: ModelSpec, rest: dict[str, Any], outputs: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Remove the stop strings from `rest`, and return them with warnings. Raises RequestError.

    Stop strings end text. They are refused if the text is also spoken, because the audio would go on.
    """
    if "stop" not in rest or "stop" in _names(spec):
        return (), ()
    stops = check_stop(rest.pop("stop"))
    if "text" not in outputs:
        return (), ("stop has no effect: the output has no text",)
    if len(outputs) > 1 and stops:
        raise RequestError(
            "stop is not supported together with audio or images",
            hint="omit it",
            field="stop",
            code="unsupported_parameter",
        )
    return stops, ()


def check_stop(value: Any) -> tuple[str, ...]:
    """Return the stop strings. Raises RequestError if there are too many, or one is empty or too long."""
    items = [value] if isinstance(value, str) else value
    allowed = f"one string or up to {MAX_STOPS} of 1 to {MAX_STOP_CHARS} characters"
    if not isinstance(items, list) or len(items) > MAX_STOPS:
        raise RequestError(f"stop must be {allowed}", field="stop", allowed=allowed)
    if not all(isinstance(item, str) and 1 <= len(item) <= MAX_STOP_CHARS for item in items):
        raise RequestError(f"stop must be {allowed}", field="stop", allowed=allowed)
    return tuple(items)


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, int) and not -MAX_INT <= value <= MAX_INT:
        raise RequestError(f"{name[:40]} has too many digits", field=name[:40])
    if isinstance(value, str) and len(value) > 400 and value.strip("+- \t").isdigit():
        raise RequestError(f"{name[:40]} has too many digits", field=name[:40])
    if isinstance(value, list):
        for item in value:
            _check_size(name, item)


def _timeout(value: Any, limit_s: float) -> tuple[float, str | None]:
    if value is None:
        return limit_s, None
    number = _number("timeout_s", value)
    if number <= 0:
        raise RequestError(f"timeout_s is {number:g}, but must be > 0", field="timeout_s", allowed="> 0")
    if number > limit_s:
        return limit_s, f"timeout_s was lowered to the server's limit of {limit_s:g}"
    return number, None


def _loop(common: Mapping[str, Any]) -> ControlLoop | None:
    """Return the client's control loop, if it names a period. Raises RequestError."""
    if "period_ms" not in common:
        if "skipped_ticks" in common:
            raise RequestError("skipped_ticks needs period_ms", hint="send period_ms too", field="period_ms")
        return None
    period_ms = _number("period_ms", common["period_ms"])
    if period_ms < MIN_PERIOD_MS:
        allowed = f">= {MIN_PERIOD_MS:g}"
        raise RequestError(f"period_ms is {period_ms:g}, but must be {allowed}", field="period_ms", allowed=allowed)
    if "skipped_ticks" not in common:
        return ControlLoop(period_ms=period_ms)
    skipped = _number("skipped_ticks", common["skipped_ticks"])
    if skipped < 0 or skipped > MAX_INT or skipped != int(skipped):
        raise RequestError("skipped_ticks must be an integer >= 0", field="skipped_ticks", allowed=">= 0")
    return ControlLoop(period_ms=period_ms, skipped_ticks=int(skipped))


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RequestError(f"{name} must be a finite number", field=name)
    return number
