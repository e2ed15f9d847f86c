"""Silver: what a request cannot be is refused before it enters the graph, by the name of its field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from mstar_core.conformance.desk import Ask
from mstar_core.conformance.endings import require_clean
from mstar_core.conformance.miniature import Miniature, miniature
from mstar_core.errors import MstarError, PluginError, RequestError
from mstar_core.plugin.conformance import Subject
from mstar_core.plugin.params import ParamSpec, param_specs
from mstar_core.plugin.processor import MediaPart

WRONG: Final[dict[str, tuple[Any, ...]]] = {
    "boolean": ("perhaps", 7),
    "integer": ("many", [1], 1.5, True),
    "number": ("much", [1.0], float("nan"), float("inf"), True),
    "string": (7, ["text"]),
    "object": (),
    "any": (),
}
"""Values of another type than the parameter's."""


def malformed_inputs(subject: Subject) -> None:
    """Each parameter outside its range and of a wrong type, no input at all, too much, and files that are none."""
    small = miniature(subject)
    base = small.asks[0]
    for item in param_specs(small.spec.params):
        for value in (*_outside(item), *_mistyped(item)):
            ask = replace(base, params={**base.params, item.name: value})
            _refused(small, ask, f"{item.name}={value!r}", item.name)
    _refused(small, replace(base, params={**base.params, "no_such_parameter": 1}), "an unknown parameter")
    for what, ask in _bodies(small, base):
        _refused(small, ask, what)


def _bodies(small: Miniature, base: Ask) -> Iterator[tuple[str, Ask]]:
    yield "a request without any input", replace(base, text=None, media=(), order=())
    if base.text is not None and not base.media:
        yield "an empty text", replace(base, text="")
        if small.has_cache:
            yield "a text longer than the context", replace(base, text="x1 " * small.bench().settings.max_seq_len)
    for kind in sorted({part.modality for part in base.media}):
        broken = [replace(p, data=b"no such file") if p.modality == kind else p for p in base.media]
        yield f"{kind} that cannot be read", replace(base, media=broken)
        empty: list[MediaPart] = [replace(p, data=b"") if p.modality == kind else p for p in base.media]
        yield f"empty {kind}", replace(base, media=empty)


def _refused(small: Miniature, ask: Ask, what: str, field: str = "") -> None:
    bench = small.bench()
    try:
        bench.send(ask)
    except RequestError as error:
        named = str(error.facts.get("field") or "")
        if not named or (field and named != field):
            raise PluginError(
                f"{what} is refused by the name {named!r}", str(error), f"name the field {field!r}" if field else ""
            ) from error
        require_clean(bench, f"after {what} was refused")
        return
    except Exception as error:
        kind = type(error).__name__
        told = str(error) if isinstance(error, MstarError) else f"{kind}: {error}"
        raise PluginError(f"{what} ends in {kind} and not in a refusal", told, "raise RequestError") from error
    raise PluginError(
        f"{what} is accepted", hint="raise RequestError with the field in process_prompt, or give a range"
    )


def _outside(item: ParamSpec) -> Iterator[Any]:
    is_list = item.kind.startswith("list of ")
    for limit, step in ((item.ge, -1.0), (item.le, 1.0), (item.gt, 0.0), (item.lt, 0.0)):
        if limit is not None:
            value: Any = limit + step
            value = int(value) if "integer" in item.kind else value
            yield [value] if is_list else value
    if item.choices and not item.any_choice and item.kind == "string":
        yield "no-such-choice"


def _mistyped(item: ParamSpec) -> Iterator[Any]:
    if item.kind.startswith("list of "):
        yield 7
        yield "no list"
        return
    yield from WRONG.get(item.kind, ())
