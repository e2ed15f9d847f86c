"""Request parameters: one dataclass per model, checked once at the edge. Used by api, planning, docs and bench."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.errors import PluginError, RequestError, did_you_mean

COMMON_NAMES: Final = (
    "seed",
    "max_output_tokens",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "ignore_eos",
    "stop",
    "timeout_s",
    "priority",
)
"""Accepted by every model on every route; one that a model has no use for gives a warning, not an error."""

LENGTH_NAMES: Final = ("max_output_tokens", "max_completion_tokens", "max_tokens")
_META: Final = "mstar"


def _article(word: str) -> str:
    return "an" if word[:1] in "aeiou" else "a"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter: its type, range and documentation. `aliases` are other names clients may send."""

    name: str
    default: Any
    doc: str
    kind: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[Any, ...] = ()
    any_choice: bool = False
    openai: str | None = None
    aliases: tuple[str, ...] = ()
    max_items: int | None = None
    required: bool = False
    nullable: bool = False

    @property
    def range_text(self) -> str:
        """The allowed values as people read them."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        low = f"> {self.gt:g}" if self.gt is not None else (f">= {self.ge:g}" if self.ge is not None else "")
        high = f"< {self.lt:g}" if self.lt is not None else (f"<= {self.le:g}" if self.le is not None else "")
        return " and ".join(part for part in (low, high) if part) or f"{_article(self.kind)} {self.kind}"


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

    Without a default the parameter is required. any_choice: choices are known names, others pass.
    """
    meta = {
        "doc": doc, "ge": ge, "gt": gt, "le": le, "lt": lt, "choices": tuple(choices), "any_choice": any_choice,
        "openai": openai, "aliases": tuple(aliases), "max_items": max_items,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata={_META: meta})


def param_specs(params: type[Any]) -> tuple[ParamSpec, ...]:
    """The parameters of a dataclass, in order. Raises PluginError for a field made without `param()`."""
    return _param_specs(typing.cast(Hashable, params))


@functools.cache
def _param_specs(params: Any) -> tuple[ParamSpec, ...]:
    hints = typing.get_type_hints(params)
    specs = []
    for item in dataclasses.fields(params):
        meta = item.metadata.get(_META)
        if meta is None:
            raise PluginError(
                f"parameter {item.name!r} has no documentation", hint="declare it with param()", phase="params"
            )
        kind, nullable = _kind(hints[item.name])
        required = item.default is dataclasses.MISSING
        default = None if required else item.default
        specs.append(
            ParamSpec(name=item.name, default=default, kind=kind, nullable=nullable, required=required, **meta)
        )
    return tuple(specs)


def _kind(hint: Any) -> tuple[str, bool]:
    args = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [a for a in args if a is not type(None)]
        if len(inner) == 1:
            return _kind(inner[0])[0], True
        return "any", len(inner) < len(args)
    origin = typing.get_origin(hint)
    if origin in (tuple, list):
        item = _kind(args[0])[0] if args else "any"
        return f"list of {item}", False
    return {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}.get(
        origin or hint, "any"
    ), False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedParams:
    """Checked parameters, the values of common names, and what the client should be told."""

    params: Any
    common: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def parse_params(params: type[Any], given: Mapping[str, Any], *, unknown: str = "error") -> ParsedParams:
    """Check `given` against a model's parameter dataclass.

    Numbers and booleans may be strings (forms). None means absent. Raises RequestError naming the field, the value
    and the allowed range; an unknown name names the nearest. unknown: `error` or `warn`.
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
            common[name] = value
            if name not in ("timeout_s", "priority"):
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


def _length_first(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    # The three names of the output limit: the most specific one wins, the others are silent synonyms.
    target = next((names[n] for n in LENGTH_NAMES if n in names), None)
    if target is None:
        return dict(given)
    rest = {name: value for name, value in given.items() if name not in LENGTH_NAMES}
    chosen = next((given[n] for n in LENGTH_NAMES if given.get(n) is not None), None)
    return rest if chosen is None else {**rest, target: chosen}


def check_value(spec: ParamSpec, value: Any) -> Any:
    """Convert and range-check one value. Raises RequestError."""
    _check_count(spec, value)
    converted = _convert(spec, value)
    if spec.choices and not spec.any_choice and converted not in spec.choices:
        hint = did_you_mean(str(converted), map(str, spec.choices)) if isinstance(converted, str) else ""
        raise _bad(spec, value, hint)
    _check_count(spec, converted)  # a list may come as text
    for number in _extremes(converted):
        if not -MOST <= number <= MOST:
            raise _bad(spec, value, "send a finite number")
        if not _in_range(spec, number):
            raise _bad(spec, value)
    return converted


def _check_count(spec: ParamSpec, value: Any) -> None:
    if spec.max_items is not None and isinstance(value, (list, tuple)) and len(value) > spec.max_items:
        raise _bad(spec, f"{len(value)} items", f"at most {spec.max_items} items")


def _extremes(value: Any) -> tuple[int | float, ...]:
    """The numbers of a value that are in range if all are: itself, or the least and the largest of a list."""
    items = value if isinstance(value, tuple) else (value,)
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


def _in_range(spec: ParamSpec, number: float) -> bool:
    return (
        (spec.ge is None or number >= spec.ge)
        and (spec.gt is None or number > spec.gt)
        and (spec.le is None or number <= spec.le)
        and (spec.lt is None or number < spec.lt)
    )


MOST: Final = 2**64
"""No parameter is larger: beyond it comparisons with floats and wire integers break."""

_TRUE: Final = frozenset({"true", "1", "yes", "on", "t", "y"})
_FALSE: Final = frozenset({"false", "0", "no", "off", "f", "n"})


def parse_bool(value: Any) -> bool | None:
    """Read a boolean as forms write it; None when it is not one."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    return True if text in _TRUE else False if text in _FALSE else None


def _convert(spec: ParamSpec, value: Any) -> Any:
    if spec.kind.startswith("list of "):
        if isinstance(value, str):
            value = _json_list(spec, value)
        if not isinstance(value, (list, tuple)):
            raise _bad(spec, value, f"send {_article(spec.kind)} {spec.kind}")
        item = dataclasses.replace(spec, kind=spec.kind.removeprefix("list of "))
        numbers = _numbers(item.kind, value)
        if numbers is not None:
            return numbers
        return tuple(_convert(item, v) for v in value)
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
    """Items that are finite numbers of a kind; None if one may not be. A loop over a grid of them holds the api."""
    types_found = set(map(type, items))
    if not types_found <= _PLAIN.get(kind, frozenset()):
        return None
    try:
        made = tuple(items) if kind == "integer" or types_found == {float} else tuple(map(float, items))
        return made if math.isfinite(sum(made)) else None
    except OverflowError:
        return None


def _json_list(spec: ParamSpec, text: str) -> Any:
    import json

    try:
        return json.loads(text)
    except ValueError as error:
        raise _bad(spec, text, "send a JSON list") from error


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
    """JSON schema of a model's parameters, for `models show`, /v1/models and the docs."""
    properties = {spec.name: _schema(spec) for spec in param_specs(params)}
    required = [spec.name for spec in param_specs(params) if spec.required]
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _array(kind: str) -> dict[str, Any]:
    inner = kind.removeprefix("list of ")
    if inner == kind:
        return {} if kind == "any" else {"type": kind}
    return {"type": "array", "items": _array(inner)}


def _schema(spec: ParamSpec) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": spec.doc}
    if spec.kind.startswith("list of "):
        schema |= _array(spec.kind)
    elif spec.kind != "any":
        schema["type"] = [spec.kind, "null"] if spec.nullable else spec.kind
    bounds = {
        "minimum": spec.ge,
        "exclusiveMinimum": spec.gt,
        "maximum": spec.le,
        "exclusiveMaximum": spec.lt,
        "maxItems": spec.max_items,
    }
    schema |= {key: bound for key, bound in bounds.items() if bound is not None}
    if spec.choices and not spec.any_choice:
        schema["enum"] = list(spec.choices)
    if not spec.required:
        schema["default"] = spec.default
    return schema
