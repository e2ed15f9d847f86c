"""ModelSpec as plain JSON data and back. Programs, bind and the parameter class go by name ("pkg.mod:name").

The form of an object holds its fields. Nodes and streams inside other objects are referenced by name. A class that
shares its place with others has a tag, such as {"kind": "loop"} of a walk.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from mstar_core.errors import GraphError, PluginError, did_you_mean
from mstar_core.graph import (
    CLIENT,
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
from mstar_core.plugin.surface import MODALITIES, Modality
from mstar_core.targets import load_target

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


def spec_from_json(data: Mapping[str, Any]) -> ModelSpec:
    """Return the spec again, importing what it names. Raises PluginError for another form version."""
    if data.get("form") != FORM_VERSION:
        raise PluginError(
            f"the spec has form {data.get('form')!r}, this reads {FORM_VERSION}",
            hint="use the same version on both sides",
        )
    reader = _Reader()
    for item in data["nodes"]:
        reader.nodes[item["name"]] = reader.made(NodeSpec, item)
    for item in data["streams"]:
        reader.streams[item["name"]] = reader.made(Stream, item)
    parts = {"nodes": tuple(reader.nodes), "streams": tuple(reader.streams)}
    spec: ModelSpec = reader.made(ModelSpec, {**data, **parts})
    return spec


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


class _Reader:
    """Reads forms by the type hints of the fields. nodes, streams: those that a form may refer to, by name."""

    def __init__(self) -> None:
        self.nodes: dict[str, Any] = {}
        self.streams: dict[str, Any] = {}

    def made(self, kind: Any, data: Mapping[str, Any]) -> Any:
        """Return the object of class `kind` whose form this is."""
        hints = typing.get_type_hints(kind)
        values = {name: self.read(hints[name], data[key]) for key, name in _keys(kind).items()}
        return kind(*values["parts"]) if kind in (Sequential, Parallel) else kind(**values)

    def read(self, hint: Any, data: Any) -> Any:
        """Return the value of a field of type `hint`."""
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if data is None or hint is Any:
            return data
        if hint in (NodeSpec, Stream):
            return _known(data, self.nodes if hint is NodeSpec else self.streams, hint.__name__)
        if origin in (typing.Union, types.UnionType) or hint is Modality:
            return self._one_of(MODALITIES if hint is Modality else args, data)
        if origin is tuple and args[-1] is not Ellipsis:
            return tuple(self.read(each, item) for each, item in zip(args, data, strict=True))
        if origin in (tuple, Sequence):
            return tuple(self.read(args[0], item) for item in data)
        if origin in (dict, Mapping):
            return {name: self.read(args[1], item) for name, item in data.items()}
        if origin in (type, Callable):
            return load_target(data)
        if hint is range or origin is frozenset:
            return range(*data) if hint is range else frozenset(data)
        if dataclasses.is_dataclass(hint):
            return self.made(hint, data)
        return hint(data) if isinstance(hint, enum.EnumType) else data

    def _one_of(self, kinds: Sequence[Any], data: Any) -> Any:
        """Return the value of a union: a tagged or otherwise distinct class, or a node unless it is CLIENT."""
        kinds = [kind for kind in kinds if kind is not types.NoneType]
        if isinstance(data, Mapping):
            for kind in kinds:
                key, tag = _TAGS.get(kind, ("", None))
                if data.get(key) == tag and {*_keys(kind), key} - {""} == set(data):
                    return self.made(kind, data)
            if all(map(dataclasses.is_dataclass, kinds)):
                raise GraphError(f"no {' or '.join(kind.__name__ for kind in kinds)} has the JSON form {data}")
        if len(kinds) == 1 or (NodeSpec in kinds and data != CLIENT):
            return self.read(kinds[0], data)
        return data


def _known(name: str, known: Mapping[str, Any], kind: str) -> Any:
    if name not in known:
        raise GraphError(f"the JSON form names {kind} {name!r}", hint=did_you_mean(name, known), place=name)
    return known[name]


def name_of(target: Any) -> str:
    """Return "pkg.mod:name" of a function or class. Raises PluginError for one that cannot be imported by name."""
    name = f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', repr(target))}"
    if "<" in name:
        raise PluginError(f"{name} has no importable name", hint="define it at the top of plugin.py", phase="spec")
    return name
