"""Passes of loops as CUDA graphs, for nodes that draw no ids: flow steps, frames of a rollout. Used by the KV step.

A loop that only reads its cache runs whole in one replay, all its iterations; one that appends runs an iteration per
replay. Shapes are learned from the passes that come: the first of a kind runs plainly, and its buckets are captured in
idle moments. Off unless `NodeSpec.capture_sizes` names rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mstar_core.engine.attention.block import host_array, port_field
from mstar_core.engine.attention.passes import FixedPasses, PassShape
from mstar_core.engine.packed_graphs import PackedGraphs, join
from mstar_core.engine.ports import keyword
from mstar_core.engine.positions import positions_of_whole
from mstar_core.engine.upload import SMALL_BYTES, upload
from mstar_core.graph.nodes import STEP

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.captured import Captures
    from mstar_core.engine.kv_sequence import Firing
    from mstar_core.engine.kv_step import Piece
    from mstar_core.engine.kv_view import KVModule
    from mstar_core.engine.page_table import PageTables
    from mstar_core.graph.nodes import NodeSpec

log = logging.getLogger(__name__)

KINDS: Final = 16
"""Kinds of passes that a node captures; later ones stay plain, and are counted as misses."""

KNOWN: Final = 1024
"""Forms of passes whose kinds are remembered."""

MOST_ITERATIONS: Final = 64
"""Iterations of a loop that one graph holds at most; a longer one runs plainly."""

SPARE: Final = 2048
"""Tokens of padding that cost more than one replay more would: they keep a device busy for longer than its weights."""

MOST_BYTES: Final = 256 << 20
"""Bytes of one bucket's inputs: passes that bring whole clips for each row are captured for few rows."""

POSITIONS: Final = "positions"
"""Field of a bucket's block that holds the position of each token."""

_STEP: Final = keyword(STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """An input in fixed shape. shape: of one row's value, or of one token's where it is not per row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_per_row: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of one value."""
        return self.dtype.itemsize * math.prod(self.shape)

    def count(self, rows: int, tokens: int) -> int:
        """Values of so many rows, of so many tokens each."""
        return rows if self.is_per_row else rows * tokens

    def is_told(self, tokens: int) -> bool:
        """Whether it may travel with other small inputs: a row's values stay on the host until a step takes them."""
        return self.size_bytes * self.count(1, tokens) <= SMALL_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PassKind:
    """What passes must agree in to share a graph. tokens: of each row. carry: output -> input, as keywords."""

    tokens: int
    ports: tuple[Port, ...]
    writes: bool
    iterations: int = 1
    carry: tuple[tuple[str, str], ...] = ()

    def __hash__(self) -> int:
        """Few of what differs: it is asked for several times a replay, and all ports would take as long as the rest."""
        return hash((self.tokens, self.writes, self.iterations, len(self.ports)))

    def sizes(self, rows: Sequence[int]) -> list[int]:
        """Of these numbers of rows, the smallest and those whose inputs are not too large."""
        each = sum(port.size_bytes * port.count(1, self.tokens) for port in self.ports)
        return [count for count in rows if count * each <= MOST_BYTES or count == min(rows)]

    def __str__(self) -> str:
        often = f", {self.iterations} iterations" if self.iterations > 1 else ""
        return f"{self.tokens} tokens {'appended' if self.writes else 'beside the cache'}{often}"


@dataclass(slots=True)
class _Bucket:
    """One graph with its buffers; positions and small ports lie beside what attention reads."""

    kind: PassKind
    shape: PassShape
    attention: FixedPasses
    ports: dict[str, Tensor]
    graph: Any = None
    outputs: dict[str, Tensor] | None = None


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

    def run(self, pieces: Sequence[Piece]) -> tuple[list[tuple[list[Piece], dict[str, Tensor]]], list[Piece]]:
        """Replay what graphs can take: batches with their packed outputs, tensors of their own; and what is left.

        What could be captured but is not yet is learned and counted as a miss. Sets `Piece.iterations`.
        """
        done: list[tuple[list[Piece], dict[str, Tensor]]] = []
        rest: list[Piece] = []
        by_kind: dict[PassKind, list[Piece]] = {}
        last, same = None, list["Piece"]()
        for piece in pieces:
            kind = self._kind(piece)
            if kind is None:
                rest.append(piece)
                continue
            if kind is not last:  # hashing one looks at all its ports
                last, same = kind, by_kind.setdefault(kind, [])
            same.append(piece)
        missed = any(_is_of_loop(piece) for piece in rest)
        for kind, group in by_kind.items():
            self._learn(kind)
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
        return done + prefixes, rest

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

    def _kind(self, piece: Piece) -> PassKind | None:
        """The kind of a pass that a graph could run: one of a loop, whole, unmasked, inputs per token or per row."""
        if not _is_graphable(piece):
            return None
        firing, job = piece.firing, piece.job
        shapes = tuple([(name, value.dtype, value.shape) for name, value in firing.ports.items()])
        key = (shapes, firing.tokens, firing.iterations, firing.attend.write)
        if key not in self._known:
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[key] = _one_pass(firing)
        one = self._known[key]
        if one is None or firing.attend.write or job is None or job.loop is None or not job.loop.fused or job.loop.emit:
            return one
        return _whole_loop(piece, one)

    def _learn(self, kind: PassKind) -> None:
        """Note the buckets of a kind that is met for the first time, the smallest first."""
        if kind in self._buckets or len(self._buckets) >= KINDS:
            return
        self._buckets[kind] = {}
        pages = self._attention.pass_pages(self._tables.ids.shape[1], kind.writes)
        self._later += [
            (kind, PassShape(rows=rows, tokens=kind.tokens, pages=most, writes=kind.writes))
            for rows in kind.sizes(self._rows)
            for most in pages
        ]
        self._later.sort(key=lambda each: (each[1].rows, each[1].pages))

    def _bucket(self, kind: PassKind, group: Sequence[Piece]) -> _Bucket | None:
        """The smallest bucket for these pieces; where none takes them all, or much of it is spare, one that is full."""
        cached = self._tables.length[[piece.branch.slot for piece in group]].tolist()
        held = max([own + piece.count * kind.writes for own, piece in zip(cached, group, strict=True)])
        pages = -(-held // self._tables.pool.page_size)
        fits = [key for key in self._buckets.get(kind, ()) if key[1] >= pages]
        if not fits:
            return None
        count = sum(piece.firing.iterations for piece in group)
        taken = rows_taken(count, kind.tokens if kind.writes else 0, {rows for rows, _ in fits})
        return self._buckets[kind][min(key for key in fits if key[0] == taken)]

    # -- running -----------------------------------------------------------------------------------------------------

    def _replay(self, bucket: _Bucket, pieces: Sequence[Piece]) -> dict[str, Tensor]:
        """One replay for these pieces. Returns the outputs that some of them want, packed, as tensors of their own."""
        count = self._fill(bucket, pieces)
        if bucket.graph is not None:
            bucket.graph.replay()
        else:
            bucket.outputs = self._step(bucket)
        assert bucket.outputs is not None
        for piece in pieces:
            piece.iterations = bucket.kind.iterations * piece.firing.iterations
        wanted = frozenset[str]().union(*(piece.wants for piece in pieces))
        return {
            name: _share(value, bucket.shape, count).clone() for name, value in bucket.outputs.items() if name in wanted
        }

    def _fill(self, bucket: _Bucket, pieces: Sequence[Piece]) -> int:
        """Bring what these pieces say to the bucket, what is small in one copy. Returns its rows in use."""
        kind = bucket.kind
        told = {POSITIONS: positions_of_whole([piece.firing for piece in pieces])}
        late: list[Port] = []
        for port in kind.ports:
            values, field = [piece.firing.ports[port.name] for piece in pieces], port_field(port.name)
            if field not in bucket.attention.device or not all([value.is_cpu for value in values]):
                late.append(port)
            elif len(values) == 1:
                told[field] = host_array(values[0])
            else:
                told[field] = host_array(torch.cat([_by_row(piece, port) for piece in pieces]))
        slots = np.array([piece.branch.slot for piece in pieces], dtype=np.int64)
        often = np.array([piece.firing.iterations for piece in pieces], dtype=np.int64)
        cached = self._tables.length[slots]
        if len(pieces) < (count := int(often.sum())):
            before = np.concatenate([np.arange(each) for each in often]) * kind.tokens
            slots, cached = np.repeat(slots, often), np.repeat(cached, often) + before
        bucket.attention.prepare(slots, cached, self._tables.ids, told)
        for port in late:  # behind what was sent, which clears the rest of its fields
            target = bucket.ports[port.name]
            if port.is_per_row and len(pieces) > 1:
                rows = [upload(row, target.device) for piece in pieces for row in piece.firing.of_rows(port.name)]
                gather(rows, target[:count])
            else:
                join([_by_row(piece, port) for piece in pieces], target[: port.count(count, kind.tokens)])
        return count

    def _step(self, bucket: _Bucket, most: int = MOST_ITERATIONS) -> dict[str, Tensor]:
        """All iterations over the bucket's buffers, up to `most`. Returns the outputs of the last, packed for the whole
        bucket.
        """
        bucket.attention.forget()
        positions, carried = bucket.attention.device[POSITIONS], dict[str, "Tensor"]()
        outputs: dict[str, Tensor] = {}
        for iteration in range(min(most, bucket.kind.iterations)):
            given = {**bucket.ports, **carried}
            if _STEP in given and iteration:
                given[_STEP] = given[_STEP] + iteration
            outputs = self._module(kv=bucket.attention.view, positions=positions, **given)
            carried = {into: outputs[port].to(bucket.ports[into].dtype) for port, into in bucket.kind.carry}
        bucket.attention.forget()
        return outputs

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
        return bucket


def _is_graphable(piece: Piece) -> bool:
    """Whether this is one pass of a loop, whole and unmasked."""
    firing = piece.firing
    if firing.is_ids or firing.is_replay or firing.given is not None or piece.samples or piece.count != firing.tokens:
        return False
    return firing.attend.mask == "full" and _is_of_loop(piece)


def _one_pass(firing: Firing) -> PassKind | None:
    """What graphs of such passes agree in; None where an input is neither per token nor per row."""
    ports = []
    for name in sorted(firing.ports):
        value, is_per_row = firing.ports[name], name in firing.per_row
        if not is_per_row and (firing.axes[name] != 0 or value.shape[0] != firing.tokens):
            return None
        leads = not is_per_row or firing.iterations > 1
        shape = tuple(value.shape[1:]) if leads else tuple(value.shape)
        ports.append(Port(name=name, dtype=value.dtype, shape=shape, is_per_row=is_per_row))
    return PassKind(tokens=firing.row_tokens, ports=tuple(ports), writes=firing.attend.write)


def _is_of_loop(piece: Piece) -> bool:
    """Whether a pass is an iteration of a loop, this engine's or the worker's: others come in too many lengths."""
    return piece.job is not None and (piece.job.loop is not None or _STEP in piece.firing.ports)


def _whole_loop(piece: Piece, one: PassKind) -> PassKind | None:
    """All iterations of a loop that reads: from its first, where nothing can end it before its last."""
    loop, state = piece.job.loop if piece.job is not None else None, piece.branch.loop
    if loop is None or state is None or loop.stop_port is not None or state.iteration:
        return None
    carry = tuple((port, keyword(into)) for port, into in sorted(loop.carry.items()))
    if not 1 <= state.limit <= MOST_ITERATIONS or any(into not in piece.firing.ports for _, into in carry):
        return None
    return replace(one, iterations=state.limit, carry=carry)


def _share(value: Tensor, shape: PassShape, count: int) -> Tensor:
    """The first `count` rows of an output of the whole bucket, packed by token or by row."""
    return value[: count * shape.tokens] if value.shape[0] == shape.rows * shape.tokens else value[:count]


def _by_row(piece: Piece, port: Port) -> Tensor:
    """A pass's values of a port, by row of the module or by token on the first axis."""
    value = piece.firing.ports[port.name]
    return value[None] if port.is_per_row and piece.firing.iterations == 1 else value


def _fitting(pieces: Sequence[Piece], rows: int) -> int:
    """How many pieces, from the first on, are no more rows than these."""
    return int(np.searchsorted(np.cumsum([piece.firing.iterations for piece in pieces]), rows, side="right"))


def rows_taken(count: int, tokens: int, sizes: Collection[int]) -> int:
    """Rows of the bucket that takes some or all of so many rows of so many tokens. sizes: those that are there."""
    holds = min((size for size in sizes if size >= count), default=max(sizes))
    if (holds - count) * tokens < SPARE:
        return holds
    return max((size for size in sizes if size <= count), default=holds)


def gather(values: Sequence[Tensor], into: Tensor) -> None:
    """Copy values of one shape into [n, ...]: by one copy where they lie evenly apart in memory, or are all the same.

    So do the shares of what a pass gave all rows together, and what all rows begin from.
    """
    first, apart = values[0], 0
    if len(values) > 1:
        storage, strides, at = first.untyped_storage().data_ptr(), first.stride(), first.data_ptr()
        apart = values[1].data_ptr() - at
        is_even = apart >= 0 and apart % first.element_size() == 0 and all(
            value.data_ptr() == at + number * apart
            and value.stride() == strides
            and value.untyped_storage().data_ptr() == storage
            for number, value in enumerate(values)
        )  # fmt: skip
        if not is_even:
            torch.stack(list(values), out=into)
            return
    into.copy_(first.as_strided((len(values), *first.shape), (apart // first.element_size(), *first.stride())))
