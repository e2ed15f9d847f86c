"""Validation of a whole ModelSpec: names, graph, parameters, samples. Called at load and by `plugins check`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mstar_core.errors import GraphError, MstarError, PluginError, did_you_mean
from mstar_core.graph import GraphEdge
from mstar_core.graph.check.graph_check import check_graph
from mstar_core.graph.declare.walks import edges_of
from mstar_core.plugin.check.dry_run import WalkInputs, dry_run
from mstar_core.plugin.check.saving_check import saving_problems
from mstar_core.plugin.params import check_value, param_specs
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import EVENTS, MODALITY_NAMES, ROUTE_INPUTS, ROUTE_OUTPUTS, ROUTES

_NAME = re.compile(r"^[a-z][a-z0-9_.-]*$")
_TARGET = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


def check_spec(spec: ModelSpec) -> list[MstarError]:
    """Return all errors of a spec, empty if it is valid."""
    errors: list[MstarError] = [*_names(spec), *_targets(spec), *_params(spec), *_surfaces(spec)]
    if not any(isinstance(error, GraphError) for error in errors):
        graph = _graph(spec)
        errors += graph or _programs(spec)
    return errors


def _names(spec: ModelSpec) -> Iterator[MstarError]:
    for name in (spec.name, *spec.aliases):
        if not _NAME.match(name):
            yield PluginError(
                f"model name {name!r} is invalid",
                hint="use lower case letters, digits and _ . -, beginning with a letter",
            )
    yield from _twice("model name", (spec.name, *spec.aliases), spec)
    yield from _twice("node", (node.name for node in spec.nodes), spec)
    yield from _twice("stream", (stream.name for stream in spec.streams), spec)
    yield from _twice("partition", (partition.name for partition in spec.partitions), spec)
    yield from _twice("walk", (walk for partition in spec.partitions for walk in partition.walks), spec)
    yield from _twice("sample", (sample.name for sample in spec.samples), spec)
    if not spec.partitions:
        yield GraphError(
            f"{spec.name} has no partition", hint="a model has at least one partition with a walk", place=spec.name
        )
    for route in sorted(spec.routes):
        if route not in ROUTES:
            yield PluginError(f"{spec.name} maps route {route!r}", hint=did_you_mean(route, ROUTES))
    walks = {walk for partition in spec.partitions for walk in partition.walks}
    for alias, walk in spec.walk_aliases.items():
        if walk not in walks:
            yield GraphError(f"walk alias {alias!r} names walk {walk!r}", hint=did_you_mean(walk, walks), place=alias)


def _twice(kind: str, names: Iterable[str], spec: ModelSpec) -> Iterator[MstarError]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield GraphError(f"{spec.name} has two {kind}s called {name!r}", hint="each name once", place=name)
        seen.add(name)


def _targets(spec: ModelSpec) -> Iterator[MstarError]:
    targets = {
        "processor": spec.processor,
        "model": spec.model,
        "tiny": spec.tiny,
        "mini": spec.mini,
        "make_samples": spec.make_samples,
        "resolve": spec.resolve,
    }
    for field, target in targets.items():
        if target is not None and not _TARGET.match(target):
            yield PluginError(f"{spec.name}: {field} is {target!r}", hint='write "package.module:Name"')
    if bool(spec.configs) != bool(spec.default_config):
        yield PluginError(
            f"{spec.name}: configs and default_config go together",
            hint='configs="package:folder", default_config="file stem"',
        )


def _params(spec: ModelSpec) -> Iterator[MstarError]:
    try:
        specs = param_specs(spec.params)
    except MstarError as error:
        yield error
        return
    if spec.at_once and spec.at_once not in {item.name for item in specs}:
        hint = did_you_mean(spec.at_once, [item.name for item in specs])
        yield PluginError(f"{spec.name}: at_once names no parameter: {spec.at_once!r}", hint=hint, phase="params")
    for item in specs:
        if not item.doc:
            yield PluginError(
                f"{spec.name}: parameter {item.name!r} has no documentation",
                hint="write a line in param()",
                phase="params",
            )
        if item.required or item.default is None and item.nullable:
            continue
        route = (item.openai or "").rpartition(":")[0]
        if route and route not in ROUTES:
            hint = did_you_mean(route, ROUTES)
            yield PluginError(f"{spec.name}: parameter {item.name!r} maps route {route!r}", hint=hint, phase="params")
        try:
            check_value(item, item.default)
        except MstarError as error:
            yield PluginError(
                f"{spec.name}: default of parameter {item.name!r} is refused", error.title, phase="params"
            )


def _surfaces(spec: ModelSpec) -> Iterator[MstarError]:
    reads, writes = {m.kind for m in spec.inputs}, {m.kind for m in spec.outputs}
    for route in sorted(spec.routes & set(ROUTE_INPUTS)):
        output = ROUTE_OUTPUTS.get(route)
        missing = [f"read {kind}" for kind in ROUTE_INPUTS[route] if kind not in reads]
        missing += [f"produce {output}"] if output is not None and output not in writes else []
        if missing:
            yield PluginError(f"{spec.name} maps route {route!r} but does not {missing[0]}", phase="surfaces")
    for route, surface in spec.surfaces.items():
        if route not in spec.routes:
            hint = did_you_mean(route, spec.routes)
            yield PluginError(
                f"{spec.name}: surface {route!r} must name one of its routes", hint=hint, phase="surfaces"
            )
        for kind in surface.beside:
            if kind not in writes:
                hint = did_you_mean(kind, writes)
                yield PluginError(f"{spec.name}: surface {route!r} requests {kind!r}", hint=hint, phase="surfaces")
        yield from _surface_params(spec, route, surface.params)


def _surface_params(spec: ModelSpec, route: str, given: Mapping[str, Any]) -> Iterator[MstarError]:
    known = {item.name: item for item in param_specs(spec.params)}
    for name, value in given.items():
        try:
            if name not in known:
                raise PluginError(f"there is no parameter {name!r}", hint=did_you_mean(name, known))
            check_value(known[name], value)
        except MstarError as error:
            yield PluginError(f"{spec.name}: surface {route!r}: {error.title}", hint=error.hint, phase="surfaces")


def _graph(spec: ModelSpec) -> list[MstarError]:
    names = frozenset(item.name for item in param_specs(spec.params))
    partitions = {partition.name: partition.walks for partition in spec.partitions}
    errors: list[MstarError] = list(check_graph(spec.nodes, spec.streams, partitions, names))
    for walks in partitions.values():
        errors += (problem for name, walk in walks.items() for problem in saving_problems(name, walk))
    emitted = {edge.modality: place for edge, place in _client_edges(spec)}
    kinds = [modality.kind for modality in spec.outputs]
    for modality, place in emitted.items():
        if modality in EVENTS:
            continue
        if modality is None or modality not in MODALITY_NAMES:
            hint = did_you_mean(modality or "", MODALITY_NAMES)
            errors.append(
                GraphError(f"{spec.name}: walk {place!r} emits modality {modality!r}", hint=hint, place=place)
            )
        elif modality not in kinds:
            errors.append(
                GraphError(
                    f"{spec.name}: walk {place!r} emits {modality}, which is not in outputs",
                    hint=did_you_mean(modality, kinds),
                    place=place,
                )
            )
    for partition in spec.partitions:
        if partition.wants is not None and partition.wants not in kinds:
            hint = did_you_mean(partition.wants, kinds)
            errors.append(
                GraphError(
                    f"{spec.name}: partition {partition.name!r} wants {partition.wants!r}",
                    hint=hint,
                    place=partition.name,
                )
            )
    return errors


def _client_edges(spec: ModelSpec) -> Iterator[tuple[GraphEdge, str]]:
    for partition in spec.partitions:
        for name, walk in partition.walks.items():
            edges = (edge for edge in edges_of(walk) if isinstance(edge, GraphEdge) and edge.is_client)
            yield from ((edge, name) for edge in edges)


def _programs(spec: ModelSpec) -> list[MstarError]:
    errors: list[MstarError] = []
    inputs: WalkInputs = {}
    for sample in spec.samples:
        if unknown := sorted(set(sample.files) - {modality.kind for modality in spec.inputs}):
            what = f"sample {sample.name!r} sends {', '.join(unknown)}, which {spec.name} does not take"
            errors.append(PluginError(what, hint="name kinds of the spec's inputs", phase="samples"))
        try:
            dry_run(spec, sample, inputs)
        except MstarError as error:
            errors.append(
                PluginError(f"{error.title} (sample {sample.name!r})", error.detail, error.hint, phase="samples")
            )
    return errors


def require_sound(specs: Sequence[ModelSpec]) -> None:
    """Raise the first error of any spec; its detail names the others."""
    for spec in specs:
        errors = check_spec(spec)
        if errors:
            first, *rest = errors
            detail = "\n".join(part for part in (first.detail, *(f"also: {error.title}" for error in rest)) if part)
            raise PluginError(first.title, detail, first.hint, phase="spec")
