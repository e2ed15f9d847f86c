"""ModelSpec: all of a model that needs no torch. Written by plugins, read by every process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mstar_core.errors import GraphError, did_you_mean
from mstar_core.graph import GraphEdge, NodeSpec, Stream, Walk
from mstar_core.graph.declare.walks import edges_of
from mstar_core.plugin.chat.format import ChatFormat
from mstar_core.plugin.program import Program, ProgramRequest
from mstar_core.plugin.surface import Action, Modality, Surface

API_VERSION = 1
"""Major version of the plugin API. A plugin declares `PLUGIN_API = 1`."""


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
    """Repository of official weights. format: `safetensors`, or `pt` (loaded with weights_only)."""

    repo: str
    files: tuple[str, ...] = ()
    format: str = "safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample request for the checks of a plugin: programs are dry-run on it and the miniature serves it.

    inputs: walk input name -> shape; segments: (kind, {input: shape}) in order.
    files: input modalities of the files sent to the miniature, in order; by default those of the segments or of the
    names of inputs. tiny: parameters that replace those of `params` for the miniature, whose sizes differ. values:
    kind of a segment -> its inputs that must not be zero in the warm-up of a GPU, such as grids: one value for all
    elements, or each of them in order. facts: see `Inputs.facts`. seconds: duration of its sounds and clips.
    """

    name: str
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    segments: Sequence[tuple[str, Mapping[str, tuple[int, ...]]]] = ()
    outputs: frozenset[str] = frozenset()
    params: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[str] = ()
    tiny: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, int | tuple[int, ...]]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unresumable:
    """Requests whose output a new attempt cannot continue, because a repetition gives another output.

    reason: a clause, such as "its noise depends on other requests". params: values that such requests have, by
    parameter; empty for all requests.
    """

    reason: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def covers(self, params: Any) -> bool:
        """Return whether a request with these parameters is one of them."""
        return all(getattr(params, name, None) == value for name, value in self.params.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model that a plugin serves.

    bind: adapts the spec to a checkpoint folder (ids, sizes) and model_kwargs with nothing but the standard
    library; every process calls it with the same arguments. processor, model: heavy targets "pkg.mod:Class", None
    when the installed version carries no model code. configs: package of default YAML files ("pkg:folder").
    tiny: target "pkg.mod:function" that writes the embedded default checkpoint into a folder.
    resolve: target "pkg.mod:function" that finds or downloads the official weights.
    routes: api routes that the model maps; surfaces: details of routes that need more than a name. chat: how its
    template writes thinking and tool calls.
    mini: target "pkg.mod:function" of the same form, for the trained miniature `NAME:mini`.
    notice, mini_notice: one line shown whenever the tiny checkpoint, or the miniature, is used.
    mini_prompt, mini_params: text and parameters that the miniature was trained for, for a suggested first request.
    mini_world: name of the simulated world that the miniature was trained in; the web page simulates
    `arm` and `block`.
    mini_config: file stem of the miniature's deployment file; empty is the default one.
    make_samples: target "pkg.mod:function" that makes `SampleInputs` to send at once; None makes them from
    the first sample.
    unresumable: requests that end with an error if their worker dies; all others go on when it is back.
    at_once: name of the parameter that says how many parts of a request run side by side, see `Inputs.parts`. Empty
    for a model whose requests have none.
    misfit: called with model_kwargs; returns why the official weights do not fit these options and which to use
    instead, empty if they fit.
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
    chat: ChatFormat = field(default_factory=ChatFormat)
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
    mini: str | None = None
    make_samples: str | None = None
    resolve: str | None = None
    notice: str = ""
    mini_notice: str = ""
    mini_prompt: str = ""
    mini_params: Mapping[str, Any] = field(default_factory=dict)
    mini_world: str = ""
    mini_config: str = ""
    unresumable: tuple[Unresumable, ...] = ()
    at_once: str = ""
    misfit: Callable[[Mapping[str, Any]], str] | None = None
    requires: Mapping[str, Any] = field(default_factory=dict)
    max_seq_len: int = 8192
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def embedded(self, variant: str) -> str | None:
        """Return the target that writes the embedded checkpoint `tiny` or `mini`, or None if there is none."""
        return {"tiny": self.tiny, "mini": self.mini}.get(variant)

    def notice_of(self, source: str) -> str:
        """Return the notice about weights of this source, `DeploymentSpec.weights_source`. Empty for real weights."""
        return {"tiny": self.notice, "mini": self.mini_notice}.get(source, "")

    def unresumable_reason(self, params: Any) -> str:
        """Return why a request with these parameters cannot be resumed after a death, empty if it can."""
        return next((each.reason for each in self.unresumable if each.covers(params)), "")

    def robot_facts(self) -> dict[str, Any]:
        """Return the sizes of a robot's requests: state, cameras, horizon and action; empty without such a route."""
        surface, output = self.surfaces.get("robot_policy"), self.output("action")
        if "robot_policy" not in self.routes or surface is None or not isinstance(output, Action):
            return {}
        return {
            "state": surface.state,
            "cameras": list(surface.cameras),
            "horizon": output.horizon,
            "action": output.dim,
        }

    def prompt_of(self, source: str) -> str:
        """Return a text for a first request to weights of this source. Empty if any text will do."""
        return self.mini_prompt if source == "mini" else ""

    def world_of(self, source: str) -> str:
        """Return the name of the simulated world of weights of this source. Empty for the real world."""
        return self.mini_world if source == "mini" else ""

    def node(self, name: str) -> NodeSpec:
        """Return the node called `name`. Raises GraphError with the nearest name."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise GraphError(
            f"{self.name} has no node {name!r}", hint=did_you_mean(name, [n.name for n in self.nodes]), place=name
        )

    def walk(self, name: str) -> tuple[Partition, Walk]:
        """Return the walk called `name` (or an alias) with its partition. Raises GraphError with the nearest name."""
        wanted = self.walk_aliases.get(name, name)
        for partition in self.partitions:
            if wanted in partition.walks:
                return partition, partition.walks[wanted]
        known = [walk for partition in self.partitions for walk in partition.walks]
        raise GraphError(
            f"{self.name} has no walk {name!r}", hint=did_you_mean(name, [*known, *self.walk_aliases]), place=name
        )

    def output(self, kind: str) -> Modality | None:
        """Return the output modality of a kind, None if there is none."""
        return next((modality for modality in self.outputs if modality.kind == kind), None)

    def input(self, kind: str) -> Modality | None:
        """Return the input modality of a kind, None if there is none."""
        return next((modality for modality in self.inputs if modality.kind == kind), None)

    def emits(self, kind: str) -> bool:
        """Return whether a walk sends values of this kind to the client."""
        edges = [edge for part in self.partitions for walk in part.walks.values() for edge in edges_of(walk)]
        return any(isinstance(edge, GraphEdge) and edge.is_client and edge.modality == kind for edge in edges)

    def sample_inputs(self, sample: Sample) -> list[str]:
        """Return the input kinds of a sample in order: from its files or segments, else from names of its inputs."""
        if sample.files:
            return list(sample.files)
        offered = [modality.kind for modality in self.inputs]
        kinds = [kind for kind, _ in sample.segments if kind in offered]
        if kinds:
            return kinds
        files = [kind for kind in offered if kind != "text" and any(kind in name for name in sample.inputs)]
        texts = ["text"] if "text" in offered else []
        return [*(files or [kind for kind in offered if kind != "text" and not texts]), *texts]

    def surface(self, route: str) -> Surface:
        """Return the details of one of the model's routes."""
        return self.surfaces.get(route) or Surface()

    def bound(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
        """Return the spec adapted to a checkpoint folder and the deployment's model_kwargs."""
        return self if self.bind is None else self.bind(self, folder, model_kwargs)

    def active_partitions(self, request: ProgramRequest) -> tuple[Partition, ...]:
        """Return the partitions that a request starts."""
        return tuple(p for p in self.partitions if p.wants is None or p.wants in request.outputs)
