"""ModelSpec: everything about a model that needs no torch. Read by every process; written by plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mstar_core.errors import GraphError, did_you_mean
from mstar_core.graph import NodeSpec, Stream, Walk
from mstar_core.plugin.modality import Modality
from mstar_core.plugin.program import Program, ProgramRequest
from mstar_core.plugin.surface import Surface

API_VERSION = 1
"""Major of the plugin API. A plugin states `PLUGIN_API = 1`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A part of the graph that runs asynchronously beside others.

    wants: runs only when the request asks for this output modality.
    """

    name: str
    program: Program
    walks: Mapping[str, Walk]
    wants: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRef:
    """Where official weights live. format: `safetensors`, or `pt` (loaded with weights_only)."""

    repo: str
    files: tuple[str, ...] = ()
    format: str = "safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A request that programs are run dry on when the plugin is checked.

    inputs: walk input name -> shape; segments: (kind, {input: shape}) in order.

    The miniature is served it too. files: input modalities of what is sent with it then, in order; without any, those
    that segments, or names of inputs, tell. tiny: parameters that go before `params` there, as its sizes differ.
    """

    name: str
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    segments: Sequence[tuple[str, Mapping[str, tuple[int, ...]]]] = ()
    outputs: frozenset[str] = frozenset()
    params: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[str] = ()
    tiny: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a plugin serves.

    bind: adapts the spec to a checkpoint folder (ids, sizes) and model_kwargs with nothing but the standard
    library; every process calls it with the same arguments. processor, model: heavy targets "pkg.mod:Class", None
    when the installed version carries no model code. configs: package of default YAML files ("pkg:folder").
    tiny: target "pkg.mod:function" that writes the embedded default checkpoint into a folder.
    resolve: target "pkg.mod:function" that finds or downloads the official weights.
    openai routes: `routes`, and `surfaces` where one needs more than its name.
    notice: one line shown whenever the tiny checkpoint is used.
    misfit: given model_kwargs, one sentence on why the official weights do not fit these options and what to name
    instead; empty where they do.
    """

    name: str
    title: str
    plugin: str
    aliases: tuple[str, ...] = ()
    inputs: tuple[Modality, ...]
    outputs: tuple[Modality, ...]
    params: type[Any]
    routes: frozenset[str] = frozenset()
    surfaces: Mapping[str, Surface] = field(default_factory=dict)
    nodes: tuple[NodeSpec, ...]
    streams: tuple[Stream, ...] = ()
    partitions: tuple[Partition, ...]
    processor: str | None = None
    model: str | None = None
    bind: Callable[[ModelSpec, Path | None, Mapping[str, Any]], ModelSpec] | None = None
    configs: str = ""
    default_config: str = ""
    weights: Mapping[str, WeightRef] = field(default_factory=dict)
    walk_aliases: Mapping[str, str] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    tiny: str | None = None
    resolve: str | None = None
    notice: str = ""
    misfit: Callable[[Mapping[str, Any]], str] | None = None
    requires: Mapping[str, Any] = field(default_factory=dict)
    max_seq_len: int = 8192
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def node(self, name: str) -> NodeSpec:
        """The node called `name`. Raises GraphError with the nearest name."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise GraphError(
            f"{self.name} has no node {name!r}", hint=did_you_mean(name, [n.name for n in self.nodes]), place=name
        )

    def walk(self, name: str) -> tuple[Partition, Walk]:
        """The walk called `name` (or an alias of it) with its partition. Raises GraphError with the nearest name."""
        wanted = self.walk_aliases.get(name, name)
        for partition in self.partitions:
            if wanted in partition.walks:
                return partition, partition.walks[wanted]
        known = [walk for partition in self.partitions for walk in partition.walks]
        raise GraphError(
            f"{self.name} has no walk {name!r}", hint=did_you_mean(name, [*known, *self.walk_aliases]), place=name
        )

    def output(self, kind: str) -> Modality | None:
        """The output modality of that kind, or None."""
        return next((modality for modality in self.outputs if modality.kind == kind), None)

    def input(self, kind: str) -> Modality | None:
        """The input modality of that kind, or None."""
        return next((modality for modality in self.inputs if modality.kind == kind), None)

    def sample_inputs(self, sample: Sample) -> list[str]:
        """What a client sends for a sample: kinds in order. Its files or segments tell, else names of its inputs."""
        if sample.files:
            return list(sample.files)
        offered = [modality.kind for modality in self.inputs]
        told = [kind for kind, _ in sample.segments if kind in offered]
        if told:
            return told
        files = [kind for kind in offered if kind != "text" and any(kind in name for name in sample.inputs)]
        texts = ["text"] if "text" in offered else []
        return [*(files or [kind for kind in offered if kind != "text" and not texts]), *texts]

    def surface(self, route: str) -> Surface:
        """What the model says of one of its routes."""
        return self.surfaces.get(route) or Surface()

    def bound(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
        """The spec adapted to a checkpoint folder and the deployment's model_kwargs."""
        return self if self.bind is None else self.bind(self, folder, model_kwargs)

    def active_partitions(self, request: ProgramRequest) -> tuple[Partition, ...]:
        """Partitions that this request starts."""
        return tuple(p for p in self.partitions if p.wants is None or p.wants in request.outputs)
