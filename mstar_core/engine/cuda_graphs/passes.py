"""Passes of loops as CUDA graphs, for nodes that draw no ids: flow steps, frames of a rollout. Used by the KV step.

A loop that only reads its cache runs whole in one replay, all its iterations. One that appends runs an iteration per
replay, or several (AHEAD) of few rows where it may: the outputs of the first go on as any, those of the others wait in
`LoopState.ready` until the engine comes to them. Shapes are learned from the passes that come: the first of a kind runs
plainly, and its buckets are captured in idle moments. Off unless `NodeSpec.capture_sizes` names rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mstar_core.engine.attention.append_only import silent
from mstar_core.engine.attention.block import host_array, port_field
from mstar_core.engine.attention.passes import FixedPasses, PassShape
from mstar_core.engine.cuda_graphs.packed_passes import PackedGraphs
from mstar_core.engine.cuda_graphs.pass_keys import (
    MOST_ITERATIONS,
    STEP_PORT,
    PassKind,
    Port,
    is_graphable,
    is_of_loop,
    later,
    one_pass,
    passes_ahead,
    whole_loop,
)
from mstar_core.engine.kv.batch import pass_positions
from mstar_core.engine.transfers import gather, join, upload

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.cache.page_table import PageTables
    from mstar_core.engine.cuda_graphs.buckets import Captures
    from mstar_core.engine.kv.batch import ScheduledChunk
    from mstar_core.engine.kv.sequence import ForwardPass
    from mstar_core.graph.spec.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule

log = logging.getLogger(__name__)

KINDS: Final = 16
"""Kinds of passes that a node captures; later ones stay plain, and are counted as misses."""

KNOWN: Final = 1024
"""Forms of passes whose kinds are remembered."""

EXACT: Final = 2
"""Numbers of rows that a kind has a bucket of its own for, besides those that the node names."""

SPARE: Final = 2048
"""Tokens of padding that cost more than one replay more would: they keep a device busy for longer than its weights."""

POSITIONS: Final = "positions"
"""Field of a bucket's block that holds the position of each token."""


@dataclass(slots=True)
class _Bucket:
    """One graph with its buffers; positions and small ports lie beside what attention reads.

    later: buffers of the iterations behind the first, where several append. outputs: of each iteration that appends,
    else of the last.
    """

    kind: PassKind
    shape: PassShape
    attention: FixedPasses
    ports: dict[str, Tensor]
    later: tuple[_Bucket, ...] = ()
    graph: Any = None
    outputs: list[dict[str, Tensor]] | None = None


class PassGraphs:
    """The captured passes of one node. Owned by its KV engine; the step runner replays them.

    On the CPU nothing is captured: the same step runs as it is, which is how it is tested there.
    """

    def __init__(
        self, spec: NodeSpec, module: KVModule, attention: AttentionBackend, tables: PageTables, slots: int,
        captures: Captures, budget: int = 1 << 30,
    ) -> None:  # fmt: skip
        enough = [rows for rows in sorted(spec.capture_sizes) if rows >= slots][:1]
        self._rows = [rows for rows in sorted(spec.capture_sizes) if rows < slots] + enough
        self._name = spec.name
        self._module = module
        self._attention = attention
        self._tables = tables
        self._device = captures.device
        self._captures = captures
        self._buckets: dict[PassKind, dict[tuple[int, int], _Bucket]] = {}
        self._later: list[tuple[PassKind, PassShape]] = []
        self._exact: dict[PassKind, set[int]] = {}
        self._known: dict[tuple[object, ...], PassKind | None] = {}
        self.counts = captures.counts
        self.packed = PackedGraphs(spec, module, attention, tables, captures, budget)

    @property
    def is_complete(self) -> bool:
        """Whether every bucket of every kind met so far is there."""
        return not self._later and self.packed.is_complete

    @property
    def most_rows(self) -> int:
        """Rows of the largest bucket of a kind that appends; 0 without one."""
        return max((rows for kind, found in self._buckets.items() if kind.writes for rows, _ in found), default=0)

    @property
    def kinds(self) -> dict[PassKind, list[tuple[int, int]]]:
        """By kind, the buckets that are there: (rows, pages), ascending."""
        return {kind: sorted(buckets) for kind, buckets in self._buckets.items()}

    def counters(self) -> dict[str, float]:
        """What captured passes did since the start, by name."""
        return self.counts.as_counters()

    def run(
        self, pieces: Sequence[ScheduledChunk]
    ) -> tuple[list[tuple[list[ScheduledChunk], dict[str, Tensor]]], list[ScheduledChunk]]:
        """Replay what graphs can take: batches with their packed outputs, tensors of their own; and what is left.

        What could be captured but is not yet is learned and counted as a miss. Sets `ScheduledChunk.iterations`.
        """
        done: list[tuple[list[ScheduledChunk], dict[str, Tensor]]] = []
        settled: list[tuple[list[ScheduledChunk], dict[str, Tensor]]] = []
        rest: list[ScheduledChunk] = []
        by_kind: dict[PassKind, list[ScheduledChunk]] = {}
        last, same = None, list["ScheduledChunk"]()
        for piece in pieces:
            if (told := _told(piece)) is not None:
                settled.append(([piece], told))
                continue
            kind = self._kind(piece)
            if kind is None:
                rest.append(piece)
                continue
            if kind is not last:  # hashing one looks at all its ports
                last, same = kind, by_kind.setdefault(kind, [])
            same.append(piece)
        missed = any(is_of_loop(piece) for piece in rest)
        for kind, group in by_kind.items():
            self._learn(kind)
            self._learn_exact(kind, group)
            if (bucket := self._bucket_ahead(kind, group)) is not None:
                done.append((group, self._replay_ahead(bucket, group)))
                self.counts.hits += bucket.kind.iterations - 1
                continue
            while group:
                bucket = self._bucket(kind, group)
                count = 0 if bucket is None else _fitting(group, bucket.shape.rows)
                if bucket is None or not count:
                    rest += group
                    missed = True
                    break
                batch, group = group[:count], group[count:]
                done.append((batch, self._replay(bucket, batch)))
        self.counts.hits += len(done)
        self.counts.misses += missed
        prefixes, rest = self.packed.run(rest)
        return settled + done + prefixes, rest

    def capture_next(self) -> bool:
        """Capture the smallest bucket that is missing. True when more are left.

        One that does not fit is left out and said to be: a larger one serves, else the plain pass. A kind that cannot
        be captured at all stays plain.
        """
        if self._later:
            kind, shape = self._later.pop(0)
            name = f"pass graph of {shape.rows} rows, {kind}, {shape.pages} pages"
            try:
                with torch.inference_mode():
                    self._captures.measured(name, lambda: self._make(kind, shape))
            except torch.OutOfMemoryError as error:
                log.error("node %s goes on without its %s: %s", self._name, name, str(error).splitlines()[0])
            except Exception as error:  # noqa: BLE001 a module that cannot be captured still runs plainly
                self._later = [each for each in self._later if each[0] != kind]
                log.error("node %s runs %s plainly: %s: %s", self._name, kind, type(error).__name__, error)
        elif not self.packed.is_complete:
            self.packed.capture_next()
        return not self.is_complete

    def compile_later(self) -> None:
        """Run each bucket that is missing once, and keep nothing of it. See CompilesLater."""
        for kind, shape in self._later:
            self._step(self._new(kind, shape), most=2)  # the second takes what the first gave, as all after it do
        self.packed.compile_later()

    # -- choosing ----------------------------------------------------------------------------------------------------

    def _kind(self, piece: ScheduledChunk) -> PassKind | None:
        """The kind of a pass that a graph could run: one of a loop, whole, unmasked, inputs per token or per row."""
        if not is_graphable(piece):
            return None
        firing, job = piece.forward, piece.job
        shapes = tuple([(name, value.dtype, value.shape) for name, value in firing.ports.items()])
        key = (shapes, firing.tokens, firing.iterations, firing.attend.write, bool(piece.wants))
        if key not in self._known:
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[key] = one_pass(firing, is_wanted=bool(piece.wants))
        one = self._known[key]
        if one is None or firing.attend.write or job is None or job.loop is None or not job.loop.fused or job.loop.emit:
            return one
        return whole_loop(piece, one)

    def _learn(self, kind: PassKind) -> None:
        """Note the buckets of a kind that is met for the first time, the smallest first."""
        if kind in self._buckets or len(self._buckets) >= KINDS:
            return
        self._buckets[kind] = {}
        self._plan(kind, self._rows)

    def _learn_exact(self, kind: PassKind, group: Sequence[ScheduledChunk]) -> None:
        """Note a bucket of just the rows of a pass that is several iterations, as requests bring as many each time.

        Padding is not free there: the products of a frame more begin another round of tiles.
        """
        rows = group[0].forward.iterations
        known = self._exact.setdefault(kind, set())
        if len(group) > 1 or rows == 1 or rows in known or len(known) >= EXACT or rows in self._rows:
            return
        if kind in self._buckets and rows < max(kind.sizes(self._rows)):
            known.add(rows)
            self._plan(kind, [rows])

    def _plan(self, kind: PassKind, sizes: Sequence[int]) -> None:
        """Capture buckets of a kind later, the smallest first."""
        pages = self._attention.pass_pages(self._tables.ids.shape[1], kind.writes)
        self._later += [
            (kind, PassShape(rows=rows, tokens=kind.tokens, pages=most, writes=kind.writes))
            for rows in kind.sizes(sizes)
            for most in pages
        ]
        self._later.sort(key=lambda each: (each[1].rows, each[1].pages))

    def _bucket_ahead(self, one: PassKind, group: Sequence[ScheduledChunk]) -> _Bucket | None:
        """The bucket that runs several iterations of all these pieces, whose kind is `one`; None: each by itself."""
        kind = passes_ahead(group, one)
        if kind is None or not kind.sizes([len(group)]):
            return None
        self._learn(kind)
        bucket = self._bucket(kind, group)
        return bucket if bucket is not None and bucket.shape.rows >= len(group) else None

    def _bucket(self, kind: PassKind, group: Sequence[ScheduledChunk]) -> _Bucket | None:
        """The smallest bucket for these pieces; where none takes them all, or much of it is spare, one that is full."""
        cached = self._tables.length[[piece.branch.slot for piece in group]].tolist()
        often = kind.iterations if kind.writes else 0
        held = max([own + piece.count * often for own, piece in zip(cached, group, strict=True)])
        pages = -(-held // self._tables.pool.page_size)
        fits = [key for key in self._buckets.get(kind, ()) if key[1] >= pages]
        if not fits:
            return None
        count = sum(piece.forward.iterations for piece in group)
        taken = rows_taken(count, kind.tokens if kind.writes else 0, {rows for rows, _ in fits})
        return self._buckets[kind][min(key for key in fits if key[0] == taken)]

    # -- running -----------------------------------------------------------------------------------------------------

    def _replay(self, bucket: _Bucket, pieces: Sequence[ScheduledChunk]) -> dict[str, Tensor]:
        """One replay for these pieces. Returns the outputs that some of them want, packed, as tensors of their own."""
        count = self._fill(bucket, pieces)
        if bucket.graph is not None:
            bucket.graph.replay()
        else:
            bucket.outputs = self._step(bucket)
        assert bucket.outputs is not None
        for piece in pieces:
            piece.iterations = bucket.kind.iterations * piece.forward.iterations
        wanted = frozenset[str]().union(*(piece.wants for piece in pieces))
        last = bucket.outputs[-1]
        return {name: _share(value, bucket.shape, count).clone() for name, value in last.items() if name in wanted}

    def _replay_ahead(self, bucket: _Bucket, pieces: Sequence[ScheduledChunk]) -> dict[str, Tensor]:
        """One replay of several iterations. Returns the first one's outputs as `_replay` does; later ones wait."""
        for ahead, each in enumerate((bucket, *bucket.later)):
            self._fill(each, pieces, ahead)
        if bucket.graph is not None:
            bucket.graph.replay()
        else:
            bucket.outputs = self._step(bucket)
        assert bucket.outputs is not None
        wanted = frozenset[str]().union(*(piece.wants for piece in pieces)) & bucket.outputs[0].keys()
        shape, count = bucket.shape, len(pieces)
        # One kernel takes a port's values of all iterations out of the graph's memory.
        whole = {
            name: torch.stack([_share(outputs[name], shape, count) for outputs in bucket.outputs]) for name in wanted
        }
        for number, piece in enumerate(pieces):
            piece.branch.loop_state.ready += [
                {name: _own(value[iteration], number, count) for name, value in whole.items()}
                for iteration in range(1, bucket.kind.iterations)
            ]
        return {name: value[0] for name, value in whole.items()}

    def _fill(self, bucket: _Bucket, pieces: Sequence[ScheduledChunk], ahead: int = 0) -> int:
        """Bring what these pieces say to the bucket, what is small in one copy. Returns its rows in use.

        ahead: how many iterations behind those of the pieces the bucket is; it will be carried what loops carry.
        """
        kind, firings = bucket.kind, [later(piece, ahead) if ahead else piece.forward for piece in pieces]
        told = {POSITIONS: pass_positions(firings)}
        late: list[Port] = []
        for port in kind.ports:
            if ahead and port.name in kind.carried:
                continue
            values, field = [firing.ports[port.name] for firing in firings], port_field(port.name)
            if field not in bucket.attention.device or not all([value.is_cpu for value in values]):
                late.append(port)
            elif len(values) == 1:
                told[field] = host_array(values[0])
            else:
                told[field] = host_array(torch.cat([_by_row(firing, port) for firing in firings]))
        slots = np.array([piece.branch.slot for piece in pieces], dtype=np.int64)
        often = np.array([firing.iterations for firing in firings], dtype=np.int64)
        cached = self._tables.length[slots] + ahead * kind.tokens
        if len(pieces) < (count := int(often.sum())):
            before = np.concatenate([np.arange(each) for each in often]) * kind.tokens
            slots, cached = np.repeat(slots, often), np.repeat(cached, often) + before
        bucket.attention.prepare(slots, cached, self._tables.ids, told)
        for port in late:  # behind what was sent, which clears the rest of its fields
            target = bucket.ports[port.name]
            if port.is_per_row and len(firings) > 1:
                rows = [upload(row, target.device) for firing in firings for row in firing.of_rows(port.name)]
                gather(rows, target[:count])
            else:
                join([_by_row(firing, port) for firing in firings], target[: port.count(count, kind.tokens)])
        return count

    def _step(self, bucket: _Bucket, most: int = MOST_ITERATIONS) -> list[dict[str, Tensor]]:
        """All iterations over the bucket's buffers, up to `most`. Returns the outputs of each that appends, else of the
        last, packed for the whole bucket.
        """
        several = (bucket, *bucket.later)
        carried = dict[str, "Tensor"]()
        told: list[dict[str, Tensor]] = []
        for each in several:
            each.attention.forget()
        for iteration in range(min(most, bucket.kind.iterations)):
            own = several[iteration] if bucket.later else bucket
            given = {**own.ports, **carried}
            if STEP_PORT in given and iteration and not bucket.later:
                given[STEP_PORT] = given[STEP_PORT] + iteration
            view = silent(own.attention.view) if bucket.kind.is_silent else own.attention.view
            outputs = self._module(kv=view, positions=own.attention.device[POSITIONS], **given)
            carried = {into: outputs[port].to(bucket.ports[into].dtype) for port, into in bucket.kind.carry}
            told.append(outputs)
        for each in several:
            each.attention.forget()
        return told if bucket.later else told[-1:]

    # -- making ------------------------------------------------------------------------------------------------------

    def _make(self, kind: PassKind, shape: PassShape) -> None:
        bucket = self._new(kind, shape)
        bucket.graph, bucket.outputs = self._captures.graph(lambda: self._step(bucket))
        self._buckets[kind][shape.rows, shape.pages] = bucket

    def _new(self, kind: PassKind, shape: PassShape) -> _Bucket:
        """A bucket with its buffers, and no graph yet."""
        sizes = {port: (port.count(shape.rows, kind.tokens), *port.shape) for port in kind.ports}
        told = {port_field(p.name): (p.dtype, math.prod(s)) for p, s in sizes.items() if p.is_told(kind.tokens)}
        beside = {POSITIONS: (torch.int64, shape.rows * kind.tokens), **told}
        attention = self._attention.fixed_passes(shape, beside)
        ports = {
            port.name: attention.device[port_field(port.name)].view(size) if port_field(port.name) in told
            else torch.zeros(size, dtype=port.dtype, device=self._device)
            for port, size in sizes.items()
        }  # fmt: skip
        bucket = _Bucket(kind, shape, attention, ports)
        none = np.zeros(0, dtype=np.int64)
        attention.prepare(none, none, self._tables.ids)
        if kind.runs_ahead:
            one = replace(kind, iterations=1)
            bucket.later = tuple(self._new(one, shape) for _ in range(1, kind.iterations))
        return bucket


def _told(piece: ScheduledChunk) -> dict[str, Tensor] | None:
    """What a replay that ran ahead gave for this pass."""
    loop = piece.branch.loop
    return loop.ready.popleft() if loop is not None and loop.ready and not piece.forward.is_replay else None


def _own(value: Tensor, number: int, count: int) -> Tensor:
    """The share of one of `count` pieces in an output of all of them."""
    size = len(value) // count
    return value[number * size : (number + 1) * size]


def _share(value: Tensor, shape: PassShape, count: int) -> Tensor:
    """The first `count` rows of an output of the whole bucket, packed by token or by row."""
    return value[: count * shape.tokens] if value.shape[0] == shape.rows * shape.tokens else value[:count]


def _by_row(firing: ForwardPass, port: Port) -> Tensor:
    """A pass's values of a port, by row of the module or by token on the first axis."""
    value = firing.ports[port.name]
    return value[None] if port.is_per_row and firing.iterations == 1 else value


def _fitting(pieces: Sequence[ScheduledChunk], rows: int) -> int:
    """How many pieces, from the first on, are no more rows than these."""
    return int(np.searchsorted(np.cumsum([piece.forward.iterations for piece in pieces]), rows, side="right"))


def rows_taken(count: int, tokens: int, sizes: Collection[int]) -> int:
    """Rows of the bucket that takes some or all of so many rows of so many tokens. sizes: those that are there."""
    holds = min((size for size in sizes if size >= count), default=max(sizes))
    if (holds - count) * tokens < SPARE:
        return holds
    return max((size for size in sizes if size <= count), default=holds)
