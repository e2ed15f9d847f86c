"""ModelSpec as plain JSON data. Programs, bind and the parameter class go by name ("pkg.mod:name").

The form of an object holds its fields. Nodes and streams inside other objects are referenced by name. A class that
shares its place with others has a tag, such as {"kind": "loop"} of a walk.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Final

from mstar_core.errors import PluginError
from mstar_core.graph import (
    FixedChunk,
    GraphNode,
    LeftContext,
    Loop,
    NodeSpec,
    Parallel,
    Sequential,
    SlidingWindow,
    StopOn,
    StopWhen,
    Stream,
)
from mstar_core.plugin.params import param_schema
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import MODALITIES

Json = dict[str, Any]
FORM_VERSION: Final = 2
_TAGS: Final[Mapping[Any, tuple[str, str]]] = {
    FixedChunk: ("policy", "fixed"),
    SlidingWindow: ("policy", "window"),
    LeftContext: ("policy", "left"),
    GraphNode: ("kind", "node"),
    Sequential: ("kind", "sequential"),
    Parallel: ("kind", "parallel"),
    Loop: ("kind", "loop"),
    StopOn: ("kind", "on"),
    StopWhen: ("kind", "when"),
    **{modality: ("kind", modality.kind) for modality in MODALITIES},
}


def spec_to_json(spec: ModelSpec) -> Json:
    """Return the whole spec. Raises PluginError for a program or parameter class that has no importable name."""
    parts = {"nodes": [form_of(node) for node in spec.nodes], "streams": [form_of(stream) for stream in spec.streams]}
    return {"form": FORM_VERSION, **form_of(spec), **parts, "params_schema": param_schema(spec.params)}


def form_of(value: Any) -> Json:
    """Return the form of a node, a stream, a walk or another declaration."""
    tag = [_TAGS[type(value)]] if type(value) in _TAGS else []
    return dict(tag) | {key: _plain(getattr(value, name)) for key, name in _keys(type(value)).items()}


def _keys(kind: Any) -> dict[str, str]:
    """Return the field names of a class by their keys in its form."""
    return {"node" if f.name == "spec" else f.name: f.name for f in dataclasses.fields(kind)}


def _plain(value: Any) -> Any:
    match value:
        case NodeSpec() | Stream():
            return value.name
        case enum.Enum():
            return str(value)
        case range():
            return [value.start, value.stop, value.step]
        case frozenset():
            return sorted(value)
        case Mapping():
            return {name: _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _ if callable(value):
            return name_of(value)
        case _:
            return form_of(value) if dataclasses.is_dataclass(value) else value


def name_of(target: Any) -> str:
    """Return "pkg.mod:name" of a function or class. Raises PluginError for one that cannot be imported by name."""
    name = f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', repr(target))}"
    if "<" in name:
        raise PluginError(f"{name} has no importable name", hint="define it at the top of plugin.py", phase="spec")
    return name
