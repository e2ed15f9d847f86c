"""ModelSpec as plain JSON data and back: programs, bind and the parameter class go by name ("pkg.mod:name")."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Final

from mstar_core.errors import PluginError
from mstar_core.graph.json_form import (
    Json,
    node_from_json,
    node_to_json,
    stream_from_json,
    stream_to_json,
    walk_from_json,
    walk_to_json,
)
from mstar_core.plugin.params import param_schema
from mstar_core.plugin.spec import ModelSpec, Partition, Sample, WeightRef
from mstar_core.plugin.surface import MODALITIES, Modality, Surface

FORM_VERSION: Final = 1
_PLAIN: Final = (
    "name",
    "title",
    "plugin",
    "processor",
    "model",
    "configs",
    "default_config",
    "tiny",
    "resolve",
    "notice",
    "max_seq_len",
)


def spec_to_json(spec: ModelSpec) -> Json:
    """The whole spec as JSON data. Raises PluginError for a program or parameter class that has no importable name."""
    return {
        "form": FORM_VERSION,
        **{name: getattr(spec, name) for name in _PLAIN},
        "aliases": list(spec.aliases),
        "inputs": [_modality_to_json(item) for item in spec.inputs],
        "outputs": [_modality_to_json(item) for item in spec.outputs],
        "params": name_of(spec.params),
        "params_schema": param_schema(spec.params),
        "routes": sorted(spec.routes),
        "surfaces": {name: _surface_to_json(surface) for name, surface in spec.surfaces.items()},
        "nodes": [node_to_json(node) for node in spec.nodes],
        "streams": [stream_to_json(stream) for stream in spec.streams],
        "partitions": [_partition_to_json(partition) for partition in spec.partitions],
        "bind": None if spec.bind is None else name_of(spec.bind),
        "misfit": None if spec.misfit is None else name_of(spec.misfit),
        "weights": {name: {**dataclasses.asdict(ref), "files": list(ref.files)} for name, ref in spec.weights.items()},
        "walk_aliases": dict(spec.walk_aliases),
        "samples": [_sample_to_json(sample) for sample in spec.samples],
        "requires": dict(spec.requires),
        "model_kwargs": dict(spec.model_kwargs),
    }


def spec_from_json(data: Mapping[str, Any]) -> ModelSpec:
    """The spec again. Imports the modules that its names point to. Raises PluginError for another form version."""
    if data.get("form") != FORM_VERSION:
        raise PluginError(
            f"the spec has form {data.get('form')!r}, this reads {FORM_VERSION}",
            hint="use the same version on both sides",
        )
    nodes: dict[str, Any] = {}
    for item in data["nodes"]:
        nodes[item["name"]] = node_from_json(item, nodes)
    streams = {item["name"]: stream_from_json(item, nodes) for item in data["streams"]}
    return ModelSpec(
        **{name: data[name] for name in _PLAIN},
        aliases=tuple(data["aliases"]),
        inputs=tuple(_modality_from_json(item) for item in data["inputs"]),
        outputs=tuple(_modality_from_json(item) for item in data["outputs"]),
        params=named(data["params"]),
        routes=frozenset(data["routes"]),
        surfaces={name: _surface_from_json(surface) for name, surface in data["surfaces"].items()},
        nodes=tuple(nodes.values()),
        streams=tuple(streams.values()),
        partitions=tuple(
            Partition(
                name=item["name"],
                program=named(item["program"]),
                walks={name: walk_from_json(walk, nodes, streams) for name, walk in item["walks"].items()},
                wants=item["wants"],
            )
            for item in data["partitions"]
        ),
        bind=None if data["bind"] is None else named(data["bind"]),
        misfit=None if data["misfit"] is None else named(data["misfit"]),
        weights={name: WeightRef(**{**ref, "files": tuple(ref["files"])}) for name, ref in data["weights"].items()},
        walk_aliases=dict(data["walk_aliases"]),
        samples=tuple(_sample_from_json(item) for item in data["samples"]),
        requires=dict(data["requires"]),
        model_kwargs=dict(data["model_kwargs"]),
    )


def _partition_to_json(partition: Partition) -> Json:
    walks = {name: walk_to_json(walk) for name, walk in partition.walks.items()}
    return {"name": partition.name, "program": name_of(partition.program), "walks": walks, "wants": partition.wants}


def _modality_to_json(modality: Modality) -> Json:
    return {"kind": modality.kind, **dataclasses.asdict(modality)}


def _modality_from_json(data: Mapping[str, Any]) -> Modality:
    facts = dict(data)
    kinds = {kind.kind: kind for kind in MODALITIES}
    return kinds[facts.pop("kind")](**facts)


def _surface_to_json(surface: Surface) -> Json:
    maps = {"params": dict(surface.params), "metadata": dict(surface.metadata)}
    return {**dataclasses.asdict(surface), **maps, "beside": list(surface.beside)}


def _surface_from_json(data: Mapping[str, Any]) -> Surface:
    return Surface(**{**data, "beside": tuple(data["beside"])})


def _sample_to_json(sample: Sample) -> Json:
    return {
        "name": sample.name,
        "inputs": {name: list(shape) for name, shape in sample.inputs.items()},
        "segments": [[kind, {name: list(shape) for name, shape in inputs.items()}] for kind, inputs in sample.segments],
        "outputs": sorted(sample.outputs),
        "params": dict(sample.params),
        "files": list(sample.files),
        "tiny": dict(sample.tiny),
    }


def _sample_from_json(data: Mapping[str, Any]) -> Sample:
    return Sample(
        name=data["name"],
        inputs={name: tuple(shape) for name, shape in data["inputs"].items()},
        segments=tuple(
            (kind, {name: tuple(shape) for name, shape in inputs.items()}) for kind, inputs in data["segments"]
        ),
        outputs=frozenset(data["outputs"]),
        params=dict(data["params"]),
        files=tuple(data["files"]),
        tiny=dict(data["tiny"]),
    )


def name_of(target: Any) -> str:
    """ "pkg.mod:name" of a function or class. Raises PluginError for one that cannot be imported by name."""
    name = f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', repr(target))}"
    if "<" in name:
        raise PluginError(f"{name} has no importable name", hint="define it at the top of plugin.py", phase="spec")
    return name


def named(name: str) -> Any:
    """Import the object that "pkg.mod:name" names. Raises PluginError if the module has no such name."""
    module, _, attribute = name.partition(":")
    target: Any = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise PluginError(
                f"{module} has no {attribute!r}", hint="install the version that wrote this spec", phase="spec"
            )
        target = getattr(target, part)
    return target
