"""Compilation of a walk: resolves every edge, carried port and run input, and collects all contradictions.

Called when a model is loaded (compile_graph) and by the graph check.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Final

from mstar_core.errors import GraphError, did_you_mean
from mstar_core.graph.compile.compiled import (
    ROOT,
    CompiledLoop,
    CompiledTask,
    CompiledWalk,
    Kind,
    LoopResult,
    Outlet,
    Source,
    TaskInput,
    Variable,
)
from mstar_core.graph.compile.resident import loop_ports, resident_ports
from mstar_core.graph.declare.nodes import CHUNK_FIRST, CHUNK_LAST, PARAM_PREFIX, RANDOM, STEP
from mstar_core.graph.declare.streams import Stream
from mstar_core.graph.declare.walks import Edge, GraphEdge, GraphNode, Loop, StreamingGraphEdge, Walk, parts_of


def is_special(name: str) -> bool:
    """Whether an input name is filled in by the runtime (STEP, RANDOM, chunk flags, parameters)."""
    return name in (STEP, RANDOM, CHUNK_FIRST, CHUNK_LAST) or name.startswith(PARAM_PREFIX)


def compile_walk(
    name: str, walk: Walk, streams: Iterable[Stream] = (), holds: Mapping[str, frozenset[str]] | None = None
) -> CompiledWalk:
    """Compile one walk. holds: node -> ports that loops of other walks may start from. Raises the first GraphError."""
    compiled, problems = wire(name, walk, streams)
    if compiled is None:
        raise problems[0]
    return _with_holds(compiled, held_ports([compiled]) if holds is None else holds)


def compile_graph(walks: Mapping[str, Walk], streams: Iterable[Stream] = ()) -> dict[str, CompiledWalk]:
    """Compile all walks of a model and hold every port that a loop may start from. Raises GraphError.

    A loop over a stream runs in the engine only if its node has no loop with other ports per sequence.
    """
    streams = tuple(streams)
    compiled = {name: compile_walk(name, walk, streams, {}) for name, walk in walks.items()}
    resident = resident_ports(compiled.values())
    compiled = {name: _with_fed(walk, resident) for name, walk in compiled.items()}
    holds = held_ports(compiled.values())
    return {name: _with_holds(walk, holds) for name, walk in compiled.items()}


def held_ports(walks: Iterable[CompiledWalk]) -> dict[str, frozenset[str]]:
    """Return the output ports by node whose last value a later Run may start from."""
    held: dict[str, set[str]] = {}
    for walk in walks:
        for loop in walk.loops:
            from_last = [variable.held for variable in loop.variables if variable.start.kind is Kind.RUN]
            if from_last and loop.stop_task is not None and loop.loop.stop is not None:
                from_last.append((walk.tasks[loop.stop_task].name, loop.loop.stop.port))
            for node, port in from_last:
                held.setdefault(node, set()).add(port)
    return {node: frozenset(ports) for node, ports in held.items()}


def _with_holds(walk: CompiledWalk, holds: Mapping[str, frozenset[str]]) -> CompiledWalk:
    def held(task: CompiledTask) -> CompiledTask:
        ports = tuple(sorted(holds.get(task.name, frozenset())))
        return replace(task, holds=ports, used=tuple(sorted({*task.used, *ports})))

    return replace(walk, tasks=tuple(held(task) for task in walk.tasks))


def _with_fed(walk: CompiledWalk, resident: Collection[str]) -> CompiledWalk:
    """Return a walk whose loops over streams run in the engine only at resident nodes."""
    loops = tuple(
        replace(loop, runs_in_engine=walk.tasks[loop.tasks[0]].name in resident)
        if loop.runs_in_engine and loop.loop.over is not None
        else loop
        for loop in walk.loops
    )
    return replace(walk, loops=loops)


def wire(name: str, walk: Walk, streams: Iterable[Stream] = ()) -> tuple[CompiledWalk | None, list[GraphError]]:
    """Compile a walk and return all problems; the walk is None when there is one."""
    wiring = _Wiring(name, tuple(streams))
    wiring.collect(walk, ())
    wiring.connect()
    compiled = None if wiring.problems else wiring.build()
    return (None if wiring.problems else compiled), wiring.problems


@dataclass(slots=True)
class _LoopBody:
    """A loop during wiring."""

    loop: Loop
    path: tuple[int, ...]
    imports: list[Source] = field(default_factory=list)
    results: dict[str, LoopResult] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)

    @property
    def parent(self) -> int:
        return self.path[-1] if self.path else ROOT


class _Wiring:
    """Working state of `wire`."""

    def __init__(self, name: str, streams: tuple[Stream, ...]) -> None:
        self.name = name
        self.streams = streams
        self.nodes: list[tuple[GraphNode, tuple[int, ...]]] = []
        self.bodies: list[_LoopBody] = []
        self.feeds: dict[tuple[int, str], dict[int, Source]] = {}
        self.outlets: dict[int, list[Outlet]] = {}
        self.bare_taps: dict[int, str] = {}
        self.problems: list[GraphError] = []

    # numbering

    def collect(self, walk: Walk, path: tuple[int, ...]) -> None:
        """Number tasks and loops in the order written."""
        match walk:
            case GraphNode():
                self.nodes.append((walk, path))
            case Loop():
                if any(body.loop.name == walk.name for body in self.bodies):
                    self.problem(f"has two loops called {walk.name!r}", walk.name, "give each loop its own name")
                self.bodies.append(_LoopBody(walk, path))
                self.collect(walk.body, (*path, len(self.bodies) - 1))
            case _:
                for part in parts_of(walk):
                    self.collect(part, path)

    def problem(self, text: str, place: str, hint: str = "") -> None:
        self.problems.append(GraphError(f"walk {self.name!r} {text}", hint=hint, place=place))

    # edges

    def connect(self) -> None:
        """Resolve edges into feeds: (task, port) -> frame -> source."""
        if not self.nodes:
            self.problem("has no node", self.name)
            return
        for index, (node, path) in enumerate(self.nodes):
            frame = path[-1] if path else ROOT
            for edge in node.outputs:
                self.edge(edge, Source(Kind.TASK, index, edge.port), frame, path, node.spec.name)
        for number, body in enumerate(self.bodies):
            for edge in body.loop.outputs:
                if self.result(number, edge.port) is not None:
                    self.edge(edge, Source(Kind.LOOP, number, edge.port), body.parent, body.path, body.loop.name)
        self.tap_streams()

    def edge(self, edge: Edge, source: Source, frame: int, path: tuple[int, ...], name: str) -> None:
        """Resolve one edge that starts in `frame`."""
        if isinstance(edge, StreamingGraphEdge):
            self.outlet(source, Outlet(edge.port, stream=edge.stream))
        elif edge.is_client:
            self.outlet(source, Outlet(edge.port, modality=edge.modality))
        else:
            for task in self.consumers(edge, path, name):
                feed = self.feeds.setdefault((task, edge.target_port), {})
                if frame in feed:
                    self.problem(
                        f"feeds port {edge.target_port!r} of {self.task_name(task)!r} twice",
                        name,
                        "join the values in a node, or rename one of them with into=",
                    )
                feed[frame] = source

    def outlet(self, source: Source, outlet: Outlet) -> None:
        key = source.at if source.kind is Kind.TASK else len(self.nodes) + source.at
        self.outlets.setdefault(key, []).append(outlet)

    def consumers(self, edge: GraphEdge, path: tuple[int, ...], name: str) -> list[int]:
        """Return the tasks that an edge reaches from a producer inside the loops `path`. Reports an edge to none."""
        target = edge.to if isinstance(edge.to, str) else edge.to.name
        uses = [(i, node, at) for i, (node, at) in enumerate(self.nodes) if node.spec.name == target]
        place = f"{self.name}.{name}.{edge.port}"
        if not uses:
            hint = did_you_mean(target, [node.spec.name for node, _ in self.nodes])
            self.problem(f"names node {target!r} in an edge of {name!r}, which the walk does not use", place, hint)
            return []
        taking = [(i, at) for i, node, at in uses if edge.target_port in node.inputs]
        if not taking:
            ports = [port for _, node, _ in uses for port in node.inputs if not is_special(port)]
            hint = did_you_mean(edge.target_port, ports)
            self.problem(
                f"sends port {edge.port!r} of {name!r} to {target!r}, which takes no input {edge.target_port!r}",
                place,
                hint,
            )
            return []
        reached = [i for i, at in taking if at[: len(path)] == path]
        if not reached:
            self.problem(
                f"sends port {edge.port!r} of {name!r} out of its loop to {target!r}",
                place,
                "write the edge in the loop's outputs=, which hands over the last iteration's value",
            )
        elif len(reached) > 1:
            self.problem(
                f"sends port {edge.port!r} of {name!r} to {target!r}, which is used {len(reached)} times "
                f"with input {edge.target_port!r}",
                place,
                "rename the input of one use with into=",
            )
        return reached[:1]

    def tap_streams(self) -> None:
        """Feed stream ports: from an enclosing loop over the stream, or one chunk for a bare use."""
        for number, body in enumerate(self.bodies):
            into = body.loop.over.into if body.loop.over is not None else None
            direct = [node for node, path in self.nodes if path and path[-1] == number]
            if into is not None and not any(n.spec.name == into[0].name and into[1] in n.inputs for n in direct):
                name = body.loop.name
                self.problem(
                    f"loop {name!r} runs over a stream into {into[0].name}.{into[1]}, which its body does not take",
                    name,
                    f"add {into[0].name!r} with input {into[1]!r} to the body",
                )
        for index, (node, path) in enumerate(self.nodes):
            for number in path:
                over = self.bodies[number].loop.over
                if over is not None and over.into[0].name == node.spec.name and over.into[1] in node.inputs:
                    source = Source(Kind.CHUNK, len(self.nodes) + number, over.into[1])
                    self.feeds.setdefault((index, over.into[1]), {}).setdefault(number, source)
            for stream in self.streams:
                owner, port = stream.into
                bare = port in node.inputs and owner.name == node.spec.name and (index, port) not in self.feeds
                if bare and not any(port in self.bodies[n].loop.carry.values() for n in path):
                    self.feeds[index, port] = {(path[-1] if path else ROOT): Source(Kind.CHUNK, index, port)}
                    if index in self.bare_taps:
                        self.problem(
                            f"lets {owner.name!r} take chunks of two streams in one firing",
                            owner.name,
                            "put one of them into a Loop(over=)",
                        )
                    self.bare_taps[index] = stream.name

    # loops

    def producer(self, loop: int, port: str) -> int | None:
        """Return the task in a loop's body that produces `port`: by its edges, else the last one with that port."""
        inside = [(i, node) for i, (node, path) in enumerate(self.nodes) if loop in path and port in node.spec.ports]
        by_edge = [i for i, node in inside if any(edge.port == port for edge in node.outputs)]
        if len(by_edge) > 1:
            names = " and ".join(self.task_name(i) for i in by_edge)
            self.problem(
                f"cannot tell which of {names} gives port {port!r} of loop {self.bodies[loop].loop.name!r}",
                self.bodies[loop].loop.name,
                "rename the port of one of them",
            )
        not_taken = [i for i, node in inside if port not in node.inputs]
        producers = by_edge or not_taken or [i for i, _ in inside]
        return producers[-1] if producers else None

    def back(self, loop: int, port: str, what: str) -> Source | None:
        """Return the source of `port` in the loop's own frame. Reports a port without a producer."""
        task = self.producer(loop, port)
        if task is None:
            known = {p for node, path in self.nodes if loop in path for p in node.spec.ports}
            name = self.bodies[loop].loop.name
            self.problem(
                f"loop {name!r} {what} port {port!r}, which no node of its body has", name, did_you_mean(port, known)
            )
            return None
        path = self.nodes[task][1]
        if path[-1] == loop:
            return Source(Kind.TASK, task, port)
        child = path[path.index(loop) + 1]
        self.result(child, port)
        return Source(Kind.LOOP, child, port)

    def result(self, loop: int, port: str) -> LoopResult | None:
        """Register `port` as a result of a loop."""
        body = self.bodies[loop]
        if port not in body.results:
            back = self.back(loop, port, "hands out")
            if back is None:
                return None
            body.results[port] = LoopResult(port, back, body.loop.carry.get(port), ())
        return body.results[port]

    def variable(self, loop: int, out: str, port: str) -> Variable | None:
        """Return one carried variable with its start and its way back."""
        body, name = self.bodies[loop], self.bodies[loop].loop.name
        takers = [i for i, (node, path) in enumerate(self.nodes) if loop in path and port in node.inputs]
        if not takers:
            known = {p for node, path in self.nodes if loop in path for p in node.inputs}
            self.problem(
                f"loop {name!r} carries into port {port!r}, which no node of its body takes",
                name,
                did_you_mean(port, known),
            )
            return None
        back = self.back(loop, out, "carries")
        if back is None:
            return None
        outside: dict[int, Source] = {}
        for task in takers:
            for frame, source in self.feeds.get((task, port), {}).items():
                if frame == ROOT or frame in body.path:
                    if outside.get(frame, source) != source:
                        self.problem(
                            f"starts port {port!r} of loop {name!r} from two edges",
                            name,
                            "a carried port has one starting value",
                        )
                    outside[frame] = source
        owner = self.producer(loop, out)
        held = (self.task_name(owner), out) if owner is not None else ("", out)
        return Variable(port, out, self.resolve(body.parent, outside, port), back, held)

    # resolving

    def resolve(self, frame: int, feed: Mapping[int, Source], port: str) -> Source:
        """Return the source of `port` in `frame`: the nearest edge, carried port or stream, else the Run."""
        if frame in feed:
            return feed[frame]
        if frame == ROOT:
            return Source(Kind.RUN, ROOT, port)
        body = self.bodies[frame]
        if port in body.loop.carry.values():
            return Source(Kind.VAR, frame, port)
        outer = self.resolve(body.parent, feed, port)
        if outer.kind is Kind.RUN:
            return outer
        if outer not in body.imports:
            body.imports.append(outer)
        return Source(Kind.IMPORT, frame, str(body.imports.index(outer)))

    def inputs(self, index: int) -> tuple[TaskInput, ...]:
        node, path = self.nodes[index]
        frame = path[-1] if path else ROOT
        inputs = []
        for port in node.inputs:
            if is_special(port):
                inputs.append(TaskInput(port, Source(Kind.SPECIAL, ROOT, port), False))
            else:
                source = self.resolve(frame, self.feeds.get((index, port), {}), port)
                text = node.spec.ports.get(port, "any")
                inputs.append(TaskInput(port, source, text.replace(" ", "").endswith("?")))
        return tuple(inputs)

    # building

    def build(self) -> CompiledWalk | None:
        """Assemble the compiled walk. Reports what keeps it from running."""
        inputs = [self.inputs(index) for index in range(len(self.nodes))]
        for number, body in enumerate(self.bodies):
            for out, port in body.loop.carry.items():
                variable = self.variable(number, out, port)
                if variable is not None:
                    body.variables[port] = variable
        stops = [self.stop_task(number) for number in range(len(self.bodies))]
        if self.problems:
            return None
        walk = CompiledWalk(
            name=self.name,
            tasks=tuple(self.task(index, inputs[index]) for index in range(len(self.nodes))),
            loops=tuple(self.compiled_loop(number, stops[number]) for number in range(len(self.bodies))),
            taps=self.bare_taps,
        )
        cycle = find_cycle(walk)
        if cycle:
            self.problem(
                f"has a cycle: {' and '.join(cycle)} wait for each other",
                cycle[0],
                "carry a value to the next iteration with a Loop's carry=",
            )
        return walk

    def stop_task(self, loop: int) -> int | None:
        stop = self.bodies[loop].loop.stop
        if stop is None:
            return None
        back = self.back(loop, stop.port, "stops on")
        if back is not None and back.kind is not Kind.TASK:
            name = self.bodies[loop].loop.name
            self.problem(
                f"loop {name!r} stops on port {stop.port!r} of a loop inside it",
                name,
                "stop on a port of a node that stands directly in the body",
            )
            return None
        return back.at if back is not None else None

    def task(self, index: int, inputs: tuple[TaskInput, ...]) -> CompiledTask:
        node, path = self.nodes[index]
        used = {edge.port for edge in node.outputs if not isinstance(edge, StreamingGraphEdge)}
        for number in path:
            body = self.bodies[number]
            backs = [variable.back for variable in body.variables.values()]
            backs += [result.back for result in body.results.values()]
            used |= {source.port for source in backs if source[:2] == (Kind.TASK, index)}
            if body.loop.stop is not None and self.producer(number, body.loop.stop.port) == index:
                used.add(body.loop.stop.port)
        outlets = tuple(self.outlets.get(index, ()))
        return CompiledTask(
            index=index,
            node=node,
            path=path,
            inputs=inputs,
            outlets=outlets,
            used=tuple(sorted(used)),
            holds=(),
            edges=frozenset({*used, *(outlet.port for outlet in outlets)}),
        )

    def compiled_loop(self, number: int, stop_task: int | None) -> CompiledLoop:
        body = self.bodies[number]
        outlets = self.outlets.get(len(self.nodes) + number, [])
        results = tuple(
            replace(result, outlets=tuple(outlet for outlet in outlets if outlet.port == result.port))
            for result in body.results.values()
        )
        tasks = tuple(i for i, (_, path) in enumerate(self.nodes) if path and path[-1] == number)
        loops = tuple(i for i, other in enumerate(self.bodies) if other.parent == number)
        over = body.loop.over
        taps = [i for i in tasks if over is not None and self.takes_chunk(i, over.into[1], number)]
        return CompiledLoop(
            index=number,
            loop=body.loop,
            path=body.path,
            tasks=tasks,
            loops=loops,
            variables=tuple(body.variables.values()),
            imports=tuple(body.imports),
            results=results,
            stop_task=stop_task,
            tap=taps[0] if taps else None,
            runs_in_engine=self.runs_in_engine(body, tasks, loops),
        )

    def runs_in_engine(self, body: _LoopBody, tasks: tuple[int, ...], loops: tuple[int, ...]) -> bool:
        """Whether the engine can iterate a loop as one job. Reports a fused loop for which it cannot."""
        has_one_node = len(tasks) == 1 and not loops
        has_stream = body.loop.over is not None or any(task in self.bare_taps for task in tasks)
        if body.loop.fused and not (has_one_node and not has_stream):
            why = "takes a stream" if has_one_node else "has several nodes"
            self.problem(
                f"has a fused loop {body.loop.name!r}, whose body {why}",
                body.loop.name,
                "the engine iterates loops of one node without a stream: leave fused= out, or join the nodes",
            )
        if body.loop.over is not None and has_one_node:
            ports = loop_ports(body.loop, self.nodes[tasks[0]][0])
            return ports is not None and ports.feed is not None and tasks[0] not in self.bare_taps
        return has_one_node and not has_stream

    def takes_chunk(self, task: int, port: str, frame: int) -> bool:
        source = self.feeds.get((task, port), {}).get(frame)
        return source is not None and source.kind is Kind.CHUNK

    def task_name(self, task: int) -> str:
        return self.nodes[task][0].spec.name


Part = tuple[Kind, int]
"""A task or a loop, by its index."""
PARTS: Final = (Kind.TASK, Kind.LOOP)


def find_cycle(walk: CompiledWalk) -> list[str]:
    """Return the names on a cycle, each before those that wait for it; empty without one."""
    try:
        TopologicalSorter(_needs(walk)).prepare()
    except CycleError as error:
        return [_name(walk, part) for part in error.args[1][:-1]]
    return []


def _needs(walk: CompiledWalk) -> Mapping[Part, Sequence[Part]]:
    """Return the parts that each part waits for, without the way back of carried ports."""
    sources: dict[Part, list[Source]] = {}
    for task in walk.tasks:
        sources[Kind.TASK, task.index] = [entry.source for entry in task.inputs]
    for loop in walk.loops:
        sources[Kind.LOOP, loop.index] = [*loop.imports, *(variable.start for variable in loop.variables)]
    return {part: [(s.kind, s.at) for s in producers if s.kind in PARTS] for part, producers in sources.items()}


def _name(walk: CompiledWalk, part: Part) -> str:
    kind, index = part
    return walk.tasks[index].name if kind is Kind.TASK else walk.loops[index].name
