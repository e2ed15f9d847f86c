"""Captured passes of loops, such as flow steps and frames of a rollout. Used by the model runner.

A loop that only reads its cache runs whole in one replay, all its iterations. A loop that appends runs one iteration
per replay, or several (AHEAD) of few sequences: the outputs of the first are returned, and those of the others wait in
`LoopState.ready` until the engine reaches them. Shapes are learned from the passes that arrive: the first of a kind
runs uncaptured, and its buckets are captured when the node is idle. Off unless `EngineHints.capture_sizes` names sizes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.attention.staging import host_array, port_field
from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.cuda_graphs.cache import Size, StaticStep, StepBuckets
from mstar_core.engine.cuda_graphs.decode import up_to
from mstar_core.engine.cuda_graphs.kinds import WirePass, WirePort, dtype_name, dtype_of, encoded
from mstar_core.engine.cuda_graphs.prefixes import PrefixSteps
from mstar_core.engine.kv.batch import pass_positions, wanted_ports
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
from mstar_core.engine.transfers import SMALL_BYTES, gather, join, upload
from mstar_core.graph.declare.nodes import STEP, keyword
from mstar_core.layers.kv_view import AppendOnlyView

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.attention.staging import Staging
    from mstar_core.engine.cache.page_table import PageTables
    from mstar_core.engine.cuda_graphs.cache import GraphCache
    from mstar_core.engine.kv.batch import ScheduledChunk
    from mstar_core.engine.kv.sequence import ForwardPass
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule

MOST_ITERATIONS: Final = 64
"""Most iterations of a loop in one graph; a longer loop runs uncaptured."""

MOST_BYTES: Final = 256 << 20
"""Most bytes of one bucket's inputs: passes with a whole clip per sequence are captured for few sequences."""

AHEAD: Final = (5, 2)
"""Iterations in one replay of a loop that appends and may run ahead. New requests wait for no more than these."""

AHEAD_TOKENS: Final = 2600
"""Most tokens of such a replay: with more, an iteration outlasts the host's work between two iterations."""

MOST_TOKENS: Final = 1600
"""Most tokens of a captured pass that only reads. A longer one outlasts its launches, and a graph keeps its memory."""

STEP_PORT: Final = keyword(STEP)
"""Keyword of the iteration number."""

MOST_KINDS: Final = 16
"""Kinds of passes that a node captures; later ones run uncaptured and count as misses."""

MOST_SIGNATURES: Final = 1024
"""Signatures of passes whose kinds are cached."""

MOST_EXACT: Final = 2
"""Exact sizes that a kind gets buckets for, besides the sizes that the node names."""

MOST_PADDING: Final = 2048
"""Tokens of padding that cost more than one more replay: they take longer to compute than the weights to read."""

POSITIONS: Final = "positions"
"""Field that holds the position of each token."""

Replayed = tuple[list["ScheduledChunk"], dict[str, "Tensor"]]
"""Chunks of one replay with copies of their packed outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """An input of static shape. shape: of the value of one sequence, or of one token if it is not per sequence."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_per_row: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of one value."""
        return self.dtype.itemsize * math.prod(self.shape)

    def count(self, rows: int, tokens: int) -> int:
        """Return the number of values of so many sequences of so many tokens each."""
        return rows if self.is_per_row else rows * tokens

    def is_small(self, tokens: int) -> bool:
        """Return whether it shares the copy of small inputs: small host values stay on the host until their step."""
        return self.size_bytes * self.count(1, tokens) <= SMALL_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PassKind:
    """Static properties that passes of one graph share. tokens: of each sequence. carry: output -> input keyword.

    is_append_only: whether only the appended keys and values are used.
    """

    tokens: int
    ports: tuple[Port, ...]
    writes: bool
    iterations: int = 1
    carry: tuple[tuple[str, str], ...] = ()
    is_append_only: bool = False

    @property
    def wire(self) -> WirePass:
        """The kind as ranks of a tensor-parallel group exchange it."""
        ports = tuple(WirePort(each.name, dtype_name(each.dtype), each.shape, each.is_per_row) for each in self.ports)
        return WirePass(self.tokens, ports, self.writes, self.iterations, self.carry, self.is_append_only)

    @classmethod
    def of_wire(cls, wire: WirePass) -> PassKind:
        """Return the kind that another rank has sent."""
        ports = tuple(
            Port(name=each.name, dtype=dtype_of(each.dtype), shape=each.shape, is_per_row=each.is_per_row)
            for each in wire.ports
        )
        return cls(
            tokens=wire.tokens,
            ports=ports,
            writes=wire.writes,
            iterations=wire.iterations,
            carry=wire.carry,
            is_append_only=wire.is_append_only,
        )

    def __hash__(self) -> int:
        """Hash a few fields: this runs several times per replay, and hashing all ports takes as long as the rest."""
        return hash((self.tokens, self.writes, self.iterations, len(self.ports)))

    @property
    def runs_ahead(self) -> bool:
        """Whether it holds several iterations that each append."""
        return self.writes and self.iterations > 1

    @property
    def carried(self) -> frozenset[str]:
        """Inputs that each iteration but the first takes from the one before."""
        return frozenset(into for _, into in self.carry)

    def sizes(self, rows: Sequence[int]) -> list[int]:
        """Return the bucket sizes that are worth a graph: the smallest, and others whose inputs are not too large."""
        if self.runs_ahead:
            return [count for count in rows if count * self.tokens * self.iterations <= AHEAD_TOKENS]
        each = sum(port.size_bytes * port.count(1, self.tokens) for port in self.ports)
        most = MOST_BYTES // max(1, each)
        if not self.writes:
            most = min(most, 3 * MOST_TOKENS // self.tokens)
        return [count for count in rows if count <= most or count == min(rows)]

    def __str__(self) -> str:
        often = f", {self.iterations} iterations" if self.iterations > 1 else ""
        return f"{self.tokens} tokens {'appended' if self.writes else 'beside the cache'}{often}"


class PassStep(StaticStep[list[dict[str, "Tensor"]]]):
    """Passes of one kind for up to `shape.sequences` sequences.

    Positions and small ports lie beside the attention metadata.
    later: buffers of the iterations after the first, if several append. outputs: those of each iteration that appends,
    else of the last.
    """

    def __init__(self, node: LoopPassSteps, kind: PassKind, shape: AttentionShape) -> None:
        self._node = node
        self.kind = kind
        self.shape = shape
        sizes = {port: (port.count(shape.sequences, kind.tokens), *port.shape) for port in kind.ports}
        small = {port_field(p.name): (p.dtype, math.prod(s)) for p, s in sizes.items() if p.is_small(kind.tokens)}
        beside = {POSITIONS: (torch.int64, shape.sequences * kind.tokens), **small}
        self._buffers = AttentionBuffers(node.attention.static(shape), node.device, beside)
        self._ports = {
            port.name: self._buffers.device[port_field(port.name)].view(size)
            if port_field(port.name) in small
            else torch.zeros(size, dtype=port.dtype, device=node.device)
            for port, size in sizes.items()
        }
        self._buffers.prepare(AttentionMetadata.empty(node.tables.ids))
        one = replace(kind, iterations=1)
        ahead = range(1, kind.iterations) if kind.runs_ahead else ()
        self.later: tuple[PassStep, ...] = tuple(PassStep(node, one, shape) for _ in ahead)

    @property
    def parts(self) -> Sequence[PassStep]:
        return (self, *self.later)

    @property
    def inlets(self) -> Sequence[Staging | AttentionBuffers]:
        return (self._buffers,)

    def late_port(self, name: str) -> Tensor:
        return self._ports[name]

    def load(self, chunks: Sequence[ScheduledChunk], ahead: int = 0) -> int:
        """Fill the buffers for these chunks, small values in one copy. Returns the sequences in use.

        ahead: iterations between the chunks and this step; carried ports are then left to the step before.
        """
        kind, forwards = self.kind, [later(chunk, ahead) if ahead else chunk.forward for chunk in chunks]
        values = {POSITIONS: pass_positions(forwards)}
        late: list[Port] = []
        for port in kind.ports:
            if ahead and port.name in kind.carried:
                continue
            given, field = [forward.ports[port.name] for forward in forwards], port_field(port.name)
            if field not in self._buffers.device or not all([value.is_cpu for value in given]):
                late.append(port)
            elif len(given) == 1:
                values[field] = host_array(given[0])
            else:
                values[field] = host_array(torch.cat([_by_row(forward, port) for forward in forwards]))
        tables = self._node.tables
        slots = np.array([chunk.branch.slot for chunk in chunks], dtype=np.int64)
        often = np.array([forward.iterations for forward in forwards], dtype=np.int64)
        cached = tables.length[slots] + ahead * kind.tokens
        if len(chunks) < (count := int(often.sum())):
            before = np.concatenate([np.arange(each) for each in often]) * kind.tokens
            slots, cached = np.repeat(slots, often), np.repeat(cached, often) + before
        metadata = AttentionMetadata.of(slots, cached, tables.ids, kind.tokens, causal=False, writes=kind.writes)
        self._buffers.prepare(metadata, values)
        for port in late:  # after the copy, which clears the other fields
            whole = self._ports[port.name]
            target = whole[: port.count(count, kind.tokens)]
            if port.is_per_row and len(forwards) > 1:
                items = [upload(item, whole.device) for forward in forwards for item in forward.of_rows(port.name)]
                gather(items, target)
            else:
                join([_by_row(forward, port) for forward in forwards], target)
            if self.on_late is not None:
                self.on_late(port.name, target)
        return count

    def forward(self) -> list[dict[str, Tensor]]:
        """Run all iterations. Returns the packed outputs of each that appends, else of the last."""
        return self._iterate(MOST_ITERATIONS)

    def warm_up(self) -> None:
        """Run two iterations: the second reads what the first gave, as all later ones do."""
        self._iterate(2)

    def _iterate(self, most: int) -> list[dict[str, Tensor]]:
        steps = (self, *self.later)
        carried = dict[str, "Tensor"]()
        outputs: list[dict[str, Tensor]] = []
        for each in steps:
            each._buffers.reset()
        for iteration in range(min(most, self.kind.iterations)):
            own = steps[iteration] if self.later else self
            given = {**own._ports, **carried}
            if STEP_PORT in given and iteration and not self.later:
                given[STEP_PORT] = given[STEP_PORT] + iteration
            view = AppendOnlyView(own._buffers.view) if self.kind.is_append_only else own._buffers.view
            outputs.append(self._node.module(kv=view, positions=own._buffers.device[POSITIONS], **given))
            carried = {into: outputs[-1][port].to(self._ports[into].dtype) for port, into in self.kind.carry}
        for each in steps:
            each._buffers.reset()
        return outputs if self.later else outputs[-1:]


class LoopPassSteps:
    """The captured passes of one node. Owned by its `NodeGraphs`; the model runner replays them."""

    def __init__(
        self,
        spec: NodeSpec,
        module: KVModule,
        attention: AttentionBackend,
        tables: PageTables,
        slots: int,
        cache: GraphCache,
        budget: int = 1 << 30,
    ) -> None:
        self._sizes = [size for (size,) in up_to(slots, spec.hints.capture_sizes, [])]
        self.module = module
        self.attention = attention
        self.tables = tables
        self.device = cache.device
        self._cache = cache
        self._buckets: dict[PassKind, StepBuckets[PassStep]] = {}
        self._exact: dict[PassKind, set[int]] = {}
        self._known: dict[tuple[object, ...], PassKind | None] = {}
        self.counts = cache.counts
        self.prefixes = PrefixSteps(spec, module, attention, tables, cache, budget)

    @property
    def most_rows(self) -> int:
        """Sequences of the largest bucket of a kind that appends, 0 without one."""
        largest = (buckets.largest for kind, buckets in self._buckets.items() if kind.writes)
        return max((size[0] for size in largest if size is not None), default=0)

    @property
    def kinds(self) -> dict[PassKind, list[Size]]:
        """Captured buckets by kind: (sequences, pages), ascending."""
        return {kind: buckets.sizes for kind, buckets in self._buckets.items()}

    def run(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[Replayed], list[ScheduledChunk]]:
        """Replay what buckets take. Returns batches with copies of their packed outputs, and the remaining chunks.

        Kinds that have no buckets yet are queued for capture and count as misses. Sets `ScheduledChunk.iterations`.
        """
        done: list[Replayed] = []
        settled: list[Replayed] = []
        rest: list[ScheduledChunk] = []
        by_kind: dict[PassKind, list[ScheduledChunk]] = {}
        last, same = None, list["ScheduledChunk"]()
        for chunk in chunks:
            if (ready := _ready(chunk)) is not None:
                settled.append(([chunk], ready))
                continue
            kind = self._kind(chunk)
            if kind is None:
                rest.append(chunk)
                continue
            if kind is not last:  # hashing a kind costs more than this comparison
                last, same = kind, by_kind.setdefault(kind, [])
            same.append(chunk)
        missed = any(is_of_loop(chunk) and chunk.forward.row_tokens <= MOST_TOKENS for chunk in rest)
        for kind, group in by_kind.items():
            self._learn(kind)
            self._learn_exact(kind, group)
            if (step := self._step_ahead(kind, group)) is not None:
                done.append((group, _replay_ahead(step, group)))
                self.counts.hits += step.kind.iterations - 1
                continue
            while group:
                step = self._step(kind, group)
                count = 0 if step is None else _fitting(group, step.shape.sequences)
                if step is None or not count:
                    rest += group
                    missed = True
                    break
                batch, group = group[:count], group[count:]
                done.append((batch, _replay(step, batch)))
        self.counts.hits += len(done)
        self.counts.misses += missed
        prefixes, rest = self.prefixes.run(rest)
        return settled + done + prefixes, rest

    def _kind(self, chunk: ScheduledChunk) -> PassKind | None:
        """Return the kind of a pass that can be captured: a whole, unmasked pass of a loop with known inputs."""
        if not self._sizes or not is_graphable(chunk):
            return None
        forward, job = chunk.forward, chunk.job
        shapes = tuple([(name, value.dtype, value.shape) for name, value in forward.ports.items()])
        key = (shapes, forward.tokens, forward.iterations, forward.attend.write, bool(chunk.wants))
        if key not in self._known:
            if len(self._known) >= MOST_SIGNATURES:
                self._known.clear()
            self._known[key] = one_pass(forward, is_wanted=bool(chunk.wants))
        one = self._known[key]
        if (
            one is None
            or forward.attend.write
            or job is None
            or job.loop is None
            or not job.loop.fused
            or job.loop.emit
        ):
            return one
        return whole_loop(chunk, one)

    def _learn(self, kind: PassKind) -> None:
        """Queue the buckets of a new kind, the smallest first."""
        if kind in self._buckets or len(self._buckets) >= MOST_KINDS:
            return
        self.buckets_of(kind)
        self._plan(kind, self._sizes)

    def buckets_of(self, kind: PassKind) -> StepBuckets[PassStep]:
        """Return the buckets of a kind; new ones are empty."""
        if kind in self._buckets:
            return self._buckets[kind]

        def build(size: Size) -> PassStep:
            return PassStep(
                self, kind, AttentionShape(sequences=size[0], tokens=kind.tokens, pages=size[1], writes=kind.writes)
            )

        def title(size: Size) -> str:
            return f"pass graph of {size[0]} sequences, {kind}, {size[1]} pages"

        self._buckets[kind] = self._cache.buckets(build, title, lambda size: (2, *size), encoded(kind.wire))
        return self._buckets[kind]

    def _learn_exact(self, kind: PassKind, group: Sequence[ScheduledChunk]) -> None:
        """Queue a bucket of the exact size of a pass that holds several iterations, which requests tend to repeat.

        Padding is not free there: one frame more may start another round of GEMM tiles.
        """
        size = group[0].forward.iterations
        known = self._exact.setdefault(kind, set())
        if len(group) > 1 or size == 1 or size in known or len(known) >= MOST_EXACT or size in self._sizes:
            return
        if kind in self._buckets and size < max(kind.sizes(self._sizes)):
            known.add(size)
            self._plan(kind, [size])

    def _plan(self, kind: PassKind, sizes: Sequence[int]) -> None:
        pages = self.attention.pass_pages(self.tables.ids.shape[1])
        self._buckets[kind].plan((size, most) for size in kind.sizes(sizes) for most in pages)

    def _step_ahead(self, one: PassKind, group: Sequence[ScheduledChunk]) -> PassStep | None:
        """Return the bucket that runs several iterations of all these chunks, whose kind is `one`."""
        kind = passes_ahead(group, one)
        if kind is None or not kind.sizes([len(group)]):
            return None
        self._learn(kind)
        step = self._step(kind, group)
        return step if step is not None and step.shape.sequences >= len(group) else None

    def _step(self, kind: PassKind, group: Sequence[ScheduledChunk]) -> PassStep | None:
        """Return the smallest bucket for these chunks, or a smaller, full one if much of it would be padding."""
        cached = self.tables.length[[chunk.branch.slot for chunk in group]].tolist()
        often = kind.iterations if kind.writes else 0
        held = max([own + chunk.count * often for own, chunk in zip(cached, group, strict=True)])
        pages = -(-held // self.tables.pool.page_size)
        buckets = self._buckets.get(kind)
        fits = [size for size in buckets.sizes if size[1] >= pages] if buckets is not None else []
        if buckets is None or not fits:
            return None
        count = sum(chunk.forward.iterations for chunk in group)
        taken = rows_taken(count, kind.tokens if kind.writes else 0, {rows for rows, _ in fits})
        return buckets[min(size for size in fits if size[0] == taken)]


def is_graphable(chunk: ScheduledChunk) -> bool:
    """Return whether this is one whole, unmasked pass of a loop, and worth a graph."""
    forward = chunk.forward
    if (
        forward.is_ids
        or forward.is_replay
        or forward.given is not None
        or chunk.samples
        or chunk.count != forward.tokens
    ):
        return False
    if isinstance(forward.position, float):  # the buffers hold whole positions
        return False
    is_short = forward.attend.write or forward.row_tokens <= MOST_TOKENS
    return forward.attend.mask == "full" and is_short and is_of_loop(chunk)


def one_pass(forward: ForwardPass, *, is_wanted: bool) -> PassKind | None:
    """Return the kind of such passes, None if an input is neither per token nor per sequence.

    is_wanted: whether their outputs are used.
    """
    ports = []
    for name in sorted(forward.ports):
        value, is_per_row = forward.ports[name], name in forward.per_row
        if not is_per_row and (forward.axes[name] != 0 or value.shape[0] != forward.tokens):
            return None
        leads = not is_per_row or forward.iterations > 1
        shape = tuple(value.shape[1:]) if leads else tuple(value.shape)
        ports.append(Port(name=name, dtype=value.dtype, shape=shape, is_per_row=is_per_row))
    writes = forward.attend.write
    return PassKind(
        tokens=forward.row_tokens, ports=tuple(ports), writes=writes, is_append_only=writes and not is_wanted
    )


def is_of_loop(chunk: ScheduledChunk) -> bool:
    """Return whether a pass is an iteration of a loop. Other passes have too many lengths to capture."""
    return chunk.job is not None and (chunk.job.loop is not None or STEP_PORT in chunk.forward.ports)


def whole_loop(chunk: ScheduledChunk, one: PassKind) -> PassKind | None:
    """Return the kind of all iterations of a loop that only reads, None if a stop rule may end it or it has begun."""
    loop, state = chunk.job.loop if chunk.job is not None else None, chunk.branch.loop
    if loop is None or state is None or loop.stop_port is not None or state.iteration:
        return None
    carry = tuple((port, keyword(into)) for port, into in sorted(loop.carry.items()))
    if not 1 <= state.limit <= MOST_ITERATIONS or any(into not in chunk.forward.ports for _, into in carry):
        return None
    return replace(one, iterations=state.limit, carry=carry)


def passes_ahead(chunks: Sequence[ScheduledChunk], one: PassKind) -> PassKind | None:
    """Return the kind of several iterations of these chunks, whose kind is `one`, if all of them may run ahead."""
    iterations = min(chunk.ahead for chunk in chunks)
    if not one.writes or iterations == 1:
        return None
    carries = {tuple(sorted(chunk.job.loop.carry.items())) for chunk in chunks if chunk.job and chunk.job.loop}
    carry = tuple((port, keyword(into)) for port, into in carries.pop())
    of_rows = {port.name for port in one.ports if port.is_per_row}
    fits = carry and not carries and of_rows.issuperset(into for _, into in carry)
    return replace(one, iterations=iterations, carry=carry) if fits else None


def later(chunk: ScheduledChunk, ahead: int) -> ForwardPass:
    """Return the pass of a chunk's loop so many iterations later, without its carried inputs."""
    forward, loop = chunk.forward, chunk.branch.loop_state
    apart, found = forward.next_position - forward.position, forward.bare()
    found.position += ahead * apart
    at = loop.iteration + ahead
    found.ports = forward.ports | {name: value[at : at + 1] for name, value in loop.lists.items()}
    if STEP_PORT in found.ports:
        found.ports[STEP_PORT] = found.ports[STEP_PORT] + ahead
    return found


def _replay(step: PassStep, chunks: Sequence[ScheduledChunk]) -> dict[str, Tensor]:
    """Run one replay. Returns copies of the packed outputs that some chunk wants."""
    count = step.load(chunks)
    outputs = step.run()[-1]
    for chunk in chunks:
        chunk.iterations = step.kind.iterations * chunk.forward.iterations
    wanted = wanted_ports(chunks)
    return {name: _share(value, step.shape, count).clone() for name, value in outputs.items() if name in wanted}


def _replay_ahead(step: PassStep, chunks: Sequence[ScheduledChunk]) -> dict[str, Tensor]:
    """Run one replay of several iterations. Returns the outputs of the first; the others wait in the loops' states."""
    for ahead, each in enumerate((step, *step.later)):
        each.load(chunks, ahead)
    made = step.run()
    wanted = wanted_ports(chunks) & made[0].keys()
    count = len(chunks)
    # One kernel per port copies the values of all iterations out of the graph's memory.
    whole = {name: torch.stack([_share(outputs[name], step.shape, count) for outputs in made]) for name in wanted}
    for number, chunk in enumerate(chunks):
        chunk.branch.loop_state.ready += [
            {name: _own(value[iteration], number, count) for name, value in whole.items()}
            for iteration in range(1, step.kind.iterations)
        ]
    return {name: value[0] for name, value in whole.items()}


def _ready(chunk: ScheduledChunk) -> dict[str, Tensor] | None:
    """Return the outputs of this pass that an earlier replay has computed ahead."""
    loop = chunk.branch.loop
    return loop.ready.popleft() if loop is not None and loop.ready and not chunk.forward.is_replay else None


def _own(value: Tensor, number: int, count: int) -> Tensor:
    """Return the share of one of `count` chunks in a packed output."""
    size = len(value) // count
    return value[number * size : (number + 1) * size]


def _share(value: Tensor, shape: AttentionShape, count: int) -> Tensor:
    """Return the first `count` sequences of a bucket's output, packed by token or by sequence."""
    return value[: count * shape.tokens] if value.shape[0] == shape.sequences * shape.tokens else value[:count]


def _by_row(forward: ForwardPass, port: Port) -> Tensor:
    """Return a pass's values of a port with sequences, or tokens, on the first axis."""
    value = forward.ports[port.name]
    return value[None] if port.is_per_row and forward.iterations == 1 else value


def _fitting(chunks: Sequence[ScheduledChunk], rows: int) -> int:
    """Return how many chunks, from the first on, fit into so many sequences."""
    return int(np.searchsorted(np.cumsum([chunk.forward.iterations for chunk in chunks]), rows, side="right"))


def rows_taken(count: int, tokens: int, sizes: Collection[int]) -> int:
    """Return the size of the bucket that takes some or all of `count` sequences of `tokens` tokens each."""
    holds = min((size for size in sizes if size >= count), default=max(sizes))
    if (holds - count) * tokens < MOST_PADDING:
        return holds
    return max((size for size in sizes if size <= count), default=holds)
