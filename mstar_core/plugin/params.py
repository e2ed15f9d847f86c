"""Request parameters: one dataclass per model, validated once at the api. Also used by planning, docs and bench."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.errors import PluginError, RequestError, did_you_mean
from mstar_core.graph.declare.sampling import INTERNAL, META, OFFERED, TextSampling
from mstar_core.value_spec import MAP, ValueSpec, value_kind

COMMON_NAMES: Final = (
    "seed",
    "max_output_tokens",
    "max_tokens",
    "max_completion_tokens",
    *OFFERED,
    "ignore_eos",
    "stop",
    "timeout_s",
    "period_ms",
    "skipped_ticks",
    "priority",
)
"""Parameters that every model accepts on every route. One without effect on a model gives a warning."""

API_NAMES: Final = frozenset(("timeout_s", "period_ms", "skipped_ticks", "priority"))
"""Common parameters that the api itself uses, whatever the model."""

LENGTH_NAMES: Final = ("max_output_tokens", "max_completion_tokens", "max_tokens")


def _article(word: str) -> str:
    return "an" if word[:1] in "aeiou" else "a"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec(ValueSpec):
    """One request parameter.

    any_choice: `choices` are the known values, others are accepted. openai: OpenAI's field that maps to it.
    aliases: further names that clients may send. max_items: of a list or a mapping.
    """

    name: str
    any_choice: bool = False
    openai: str | None = None
    aliases: tuple[str, ...] = ()
    max_items: int | None = None

    @property
    def range_text(self) -> str:
        """The allowed values as people read them."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        return self.limits_text or f"{_article(self.kind)} {self.kind}"


def param(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Sequence[Any] = (),
    any_choice: bool = False,
    openai: str | None = None,
    aliases: Sequence[str] = (),
    max_items: int | None = None,
) -> Any:
    """Declare a parameter of a model's dataclass: default, one line of documentation, range.

    A parameter without a default is required. any_choice: `choices` are the known values, others are accepted.
    """
    meta = {
        "doc": doc,
        "ge": ge,
        "gt": gt,
        "le": le,
        "lt": lt,
        "choices": tuple(choices),
        "any_choice": any_choice,
        "openai": openai,
        "aliases": tuple(aliases),
        "max_items": max_items,
    }
    return dataclasses.field(default=default, metadata={META: meta})


def sampling_param(
    name: str, default: Any, doc: str = "", *, openai: str | None = None, aliases: Sequence[str] = ()
) -> Any:
    """Declare a sampling parameter with another default, documentation or name than its entry in the table has.

    name: of the entry. openai: as in `param`; None: the entry's.
    """
    entry = next(item for item in dataclasses.fields(TextSampling) if item.name == name)
    changed = {"doc": doc or entry.metadata[META]["doc"], "aliases": tuple(aliases)}
    if openai is not None:
        changed["openai"] = openai
    return dataclasses.field(default=default, metadata={META: {**entry.metadata[META], **changed}})


def param_specs(params: type[Any]) -> tuple[ParamSpec, ...]:
    """Return the parameters that clients can set, in order. Raises PluginError for a field without `param()`."""
    return _param_specs(typing.cast(Hashable, params))


@functools.cache
def _param_specs(params: Any) -> tuple[ParamSpec, ...]:
    hints = typing.get_type_hints(params)
    specs = []
    for item in dataclasses.fields(params):
        if INTERNAL in item.metadata:
            continue
        meta = item.metadata.get(META)
        if meta is None:
            raise PluginError(
                f"parameter {item.name!r} has no documentation", hint="declare it with param()", phase="params"
            )
        kind, nullable = value_kind(hints[item.name])
        required = item.default is dataclasses.MISSING
        default = None if required else item.default
        specs.append(
            ParamSpec(name=item.name, default=default, kind=kind, nullable=nullable, required=required, **meta)
        )
    return tuple(specs)


def lowered_warnings(params: Any, name: str, room: int) -> list[str]:
    """Return the warning that a limit was lowered to the space left in the context, none for the model's default."""
    wanted = getattr(params, name)
    default = next((each.default for each in dataclasses.fields(params) if each.name == name), None)
    if wanted <= room or wanted == default:
        return []
    return [f"{name} was lowered from {wanted} to {room}, the space left in the context"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonParams(TextSampling):
    """Types and ranges of common parameters. They also apply to models without the parameter."""

    max_output_tokens: int = param(doc="maximum number of tokens to generate", ge=1)
    max_completion_tokens: int = param(doc="used if max_output_tokens is absent", ge=1)
    max_tokens: int = param(doc="used if max_completion_tokens is absent", ge=1)
    ignore_eos: bool = param(doc="for load tests: generate up to the limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedParams:
    """Validated parameters, the values of common names, and warnings for the client."""

    params: Any
    common: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def parse_params(params: type[Any], given: Mapping[str, Any], *, unknown: str = "error") -> ParsedParams:
    """Validate `given` against a model's parameter dataclass.

    Numbers and booleans may be strings, as forms send them. None means absent. unknown: `error` or `warn`. Common
    parameters without effect are checked too.
    Raises RequestError naming the field, the value and the allowed range, or the nearest name of an unknown field.
    """
    specs = {spec.name: spec for spec in param_specs(params)}
    names = {alias: spec.name for spec in specs.values() for alias in (spec.name, *spec.aliases)}
    values: dict[str, Any] = {}
    common: dict[str, Any] = {}
    warnings: list[str] = []
    for name, value in _length_first(given, names).items():
        if value is None:
            continue
        target = names.get(name)
        if target is not None:
            if target not in values or name == target:
                values[target] = check_value(specs[target], value)
        elif name in COMMON_NAMES:
            _check_common(name, value)
            common[name] = value
            if name not in API_NAMES:
                warnings.append(f"{name} has no effect on this model")
        elif unknown == "warn":
            warnings.append(f"unknown parameter {name} was ignored")
        else:
            hint = did_you_mean(name, [*names, *COMMON_NAMES])
            raise RequestError(f"unknown parameter {name!r}", hint=hint, field=name, code="unknown_parameter")
    missing = [spec.name for spec in specs.values() if spec.required and spec.name not in values]
    if missing:
        raise RequestError(
            f"parameter {missing[0]!r} is required", specs[missing[0]].doc, field=missing[0], code="missing_field"
        )
    made = params(**values)
    check = getattr(made, "check", None)
    for problem in check() if check is not None else ():
        raise problem
    return ParsedParams(params=made, common=common, warnings=tuple(warnings))


def _length_first(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    # The output limit has three names: the most specific one wins and the others are ignored without a warning.
    target = next((names[n] for n in LENGTH_NAMES if n in names), None)
    if target is None:
        return dict(values)
    rest = {name: value for name, value in values.items() if name not in LENGTH_NAMES}
    given = [(name, values[name]) for name in LENGTH_NAMES if values.get(name) is not None]
    for name, value in given[1:]:
        _check_common(name, value)
    chosen = given[0][1] if given else None
    return rest if chosen is None else {**rest, target: chosen}


def _check_common(name: str, value: Any) -> None:
    spec = next((spec for spec in param_specs(CommonParams) if spec.name == name), None)
    if spec is not None:  # the api itself checks the others
        check_value(spec, value)


def check_value(spec: ParamSpec, value: Any) -> Any:
    """Convert one value and check its range. Raises RequestError."""
    _check_count(spec, value)
    converted = _convert(spec, value)
    if spec.choices and not spec.any_choice and converted not in spec.choices:
        hint = did_you_mean(str(converted), map(str, spec.choices)) if isinstance(converted, str) else ""
        raise _bad(spec, value, hint)
    _check_count(spec, converted)  # a list may come as text
    for number in _extremes(converted):
        if not -MOST <= number <= MOST:
            raise _bad(spec, value, "send a finite number")
        if not spec.contains(number):
            raise _bad(spec, value)
    return converted


def _check_count(spec: ParamSpec, value: Any) -> None:
    if spec.max_items is not None and isinstance(value, (list, tuple, dict)) and len(value) > spec.max_items:
        raise _bad(spec, f"{len(value)} items", f"at most {spec.max_items} items")


def _extremes(value: Any) -> tuple[int | float, ...]:
    """Return the numbers that decide whether a value is in range: itself, or the extremes of a list or a mapping."""
    items = value if isinstance(value, tuple) else tuple(value.values()) if isinstance(value, dict) else (value,)
    if items and set(map(type, items)) <= {int, float}:
        return min(items), max(items)
    return ()


def _bad(spec: ParamSpec, value: Any, hint: str = "") -> RequestError:
    text = repr(value[:60] if isinstance(value, (str, bytes, list, tuple)) else value)
    shown = text if len(text) <= 60 else text[:57] + "..."
    allowed = spec.range_text
    return RequestError(
        f"{spec.name} is {shown}, allowed is {allowed}", hint=hint, field=spec.name, value=shown, allowed=allowed
    )


MOST: Final = 2**64
"""Largest magnitude of a number. Beyond it, comparisons with floats and wire integers break."""

_MOST_DIGITS: Final = 18
"""Digits of an id; more could exceed an int64."""

_TRUE: Final = frozenset({"true", "1", "yes", "on", "t", "y"})
_FALSE: Final = frozenset({"false", "0", "no", "off", "f", "n"})


def parse_bool(value: Any) -> bool | None:
    """Parse a boolean as forms write it; None if it is not one."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    return True if text in _TRUE else False if text in _FALSE else None


def _convert(spec: ParamSpec, value: Any) -> Any:
    if spec.kind.startswith("list of "):
        if isinstance(value, str):
            value = _json(spec, value, "list")
        if not isinstance(value, (list, tuple)):
            raise _bad(spec, value, f"send {_article(spec.kind)} {spec.kind}")
        item = dataclasses.replace(spec, kind=spec.kind.removeprefix("list of "))
        numbers = _numbers(item.kind, value)
        if numbers is not None:
            return numbers
        return tuple(_convert(item, v) for v in value)
    if spec.kind.startswith(MAP):
        return _map(spec, value)
    match spec.kind:
        case "boolean":
            flag = parse_bool(value)
            if flag is None:
                raise _bad(spec, value, "send true or false")
            return flag
        case "integer" | "number":
            return _number(spec, value)
        case "string":
            if not isinstance(value, str):
                raise _bad(spec, value, "send a string")
            return value
        case _:
            return value


_PLAIN: Final = {"number": frozenset({int, float}), "integer": frozenset({int})}


def _numbers(kind: str, items: Sequence[Any]) -> tuple[int | float, ...] | None:
    """Convert items that are all finite numbers of a kind, else None. A loop over a large grid would stall the api."""
    types_found = set(map(type, items))
    if not types_found <= _PLAIN.get(kind, frozenset()):
        return None
    try:
        made = tuple(items) if kind == "integer" or types_found == {float} else tuple(map(float, items))
        return made if math.isfinite(sum(made)) else None
    except OverflowError:
        return None


def _map(spec: ParamSpec, value: Any) -> dict[int, Any]:
    """Convert a mapping from ids, which JSON writes as text."""
    if isinstance(value, str):
        value = _json(spec, value, "object")
    if not isinstance(value, dict):
        raise _bad(spec, value, "send an object of ids and numbers")
    _check_count(spec, value)
    item = dataclasses.replace(spec, kind=spec.kind.removeprefix(MAP))
    converted = {}
    for key, number in value.items():
        text = str(key)
        if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
            raise _bad(spec, f"{{{text[:40]!r}: ...}}", "name ids by their numbers")
        converted[int(text)] = _convert(item, number)
    return converted


def _json(spec: ParamSpec, text: str, form: str) -> Any:
    import json

    try:
        return json.loads(text)
    except ValueError as error:
        raise _bad(spec, text, f"send a JSON {form}") from error


def _number(spec: ParamSpec, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _bad(spec, value, f"send {_article(spec.kind)} {spec.kind}")
    try:
        number: int | float = float(value) if spec.kind == "number" else int(value)
    except (ValueError, OverflowError) as error:
        raise _bad(spec, value, f"send {_article(spec.kind)} {spec.kind}") from error
    if isinstance(value, float) and spec.kind == "integer" and number != value:
        raise _bad(spec, value, "send a whole number")
    if not -MOST <= number <= MOST or not math.isfinite(number):
        raise _bad(spec, value, "send a finite number")
    return number


def param_schema(params: type[Any]) -> dict[str, Any]:
    """Return the JSON schema of a model's parameters, for `models show`, /v1/models and the docs."""
    properties = {spec.name: _schema(spec) for spec in param_specs(params)}
    required = [spec.name for spec in param_specs(params) if spec.required]
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _array(kind: str) -> dict[str, Any]:
    inner = kind.removeprefix("list of ")
    if inner == kind:
        return {} if kind == "any" else {"type": kind}
    return {"type": "array", "items": _array(inner)}


def _object(spec: ParamSpec) -> dict[str, Any]:
    size = {} if spec.max_items is None else {"maxProperties": spec.max_items}
    return {
        "type": ["object", "null"] if spec.nullable else "object",
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {"type": spec.kind.removeprefix(MAP), **spec.bounds},
        **size,
        "default": spec.default,
    }


def _schema(spec: ParamSpec) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": spec.doc}
    if spec.kind.startswith("list of "):
        schema |= _array(spec.kind)
    elif spec.kind.startswith(MAP):
        schema |= _object(spec)
        return schema
    elif spec.kind != "any":
        schema["type"] = [spec.kind, "null"] if spec.nullable else spec.kind
    schema |= spec.bounds
    if spec.max_items is not None:
        schema["maxItems"] = spec.max_items
    if spec.choices:
        schema["examples" if spec.any_choice else "enum"] = list(spec.choices)
    if not spec.required:
        schema["default"] = spec.default
    return schema
