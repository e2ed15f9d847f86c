"""Silver checks: malformed requests are refused before they enter the graph, naming the field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from mstar_core.conformance.endings import require_clean
from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.light import outside_range
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
"""Values of a wrong type, by parameter kind."""


def malformed_inputs(subject: Subject) -> None:
    """Send each parameter outside its range and of a wrong type, no input, too long input, and broken files."""
    small = miniature(subject)
    base = small.asks[0]
    for item in param_specs(small.spec.params):
        for value in (*outside_range(item), *_mistyped(item)):
            ask = replace(base, params={**base.params, item.name: value})
            _refused(small, ask, f"{item.name}={value!r}", item.name)
    _refused(small, replace(base, params={**base.params, "no_such_parameter": 1}), "an unknown parameter")
    for what, ask in _bodies(small, base):
        _refused(small, ask, what)


def _bodies(small: Miniature, base: SampleRequest) -> Iterator[tuple[str, SampleRequest]]:
    yield "a request without any input", replace(base, text=None, media=(), order=())
    if base.text is not None and not base.media:
        yield "an empty text", replace(base, text="")
        if small.has_cache:
            yield "a text longer than the context", replace(base, text="x1 " * small.runtime().settings.max_seq_len)
    for kind in sorted({part.modality for part in base.media}):
        broken = [replace(p, data=b"no such file") if p.modality == kind else p for p in base.media]
        yield f"{kind} that cannot be read", replace(base, media=broken)
        empty: list[MediaPart] = [replace(p, data=b"") if p.modality == kind else p for p in base.media]
        yield f"empty {kind}", replace(base, media=empty)


def _refused(small: Miniature, ask: SampleRequest, what: str, field: str = "") -> None:
    runtime = small.runtime()
    try:
        runtime.send(ask)
    except RequestError as error:
        named = str(error.facts.get("field") or "")
        if not named or (field and named != field):
            raise PluginError(
                f"the refusal of {what} names field {named!r}", str(error), f"name the field {field!r}" if field else ""
            ) from error
        require_clean(runtime, f"after {what} was refused")
        return
    except Exception as error:
        kind = type(error).__name__
        cause = str(error) if isinstance(error, MstarError) else f"{kind}: {error}"
        raise PluginError(f"{what} raises {kind} instead of RequestError", cause, "raise RequestError") from error
    raise PluginError(
        f"{what} is accepted", hint="raise RequestError with the field in process_prompt, or give a range"
    )


def _mistyped(item: ParamSpec) -> Iterator[Any]:
    if item.kind.startswith("list of "):
        yield 7
        yield "no list"
        return
    yield from WRONG.get(item.kind, ())
