"""Whole passes outside loops as CUDA graphs, one per bucket of packed tokens: prefixes that see all of themselves.

A replay takes passes of any lengths, on rows that hold nothing yet; what is left of the bucket is nobody's and reaches
no page. All buckets of a kind share their inputs' memory, but for numbers, which travel with what attention reads. Used
by the pass graphs; off unless `NodeSpec.capture_tokens` names buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mstar_core.engine.attention.block import Block, host_array, port_field
from mstar_core.engine.attention.segments import PackedPrompts
from mstar_core.engine.kv.batch import pass_positions
from mstar_core.engine.transfers import join

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.attention.block import Values
    from mstar_core.engine.attention.packed import FixedPacked
    from mstar_core.engine.cache.page_table import PageTables
    from mstar_core.engine.cuda_graphs.buckets import Captures
    from mstar_core.engine.kv.batch import ScheduledChunk
    from mstar_core.graph.spec.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule, KVView

log = logging.getLogger(__name__)

KINDS: Final = 2
"""Kinds of packed passes that a node captures; later ones stay plain, and are counted as misses."""

FEWEST_ROWS: Final = 4
TOKENS_PER_ROW: Final = 128
"""A bucket takes one pass per so many tokens, but at least FEWEST_ROWS."""

Kind = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
"""Inputs of a pass, by name: dtype and shape of one token's value."""


@dataclass(slots=True)
class _Bucket:
    """One graph with its buffers."""

    tokens: int
    rows: int
    attention: FixedPacked
    block: Block
    view: KVView
    ports: dict[str, Tensor]
    graph: Any = None
    outputs: dict[str, Tensor] | None = None


class PackedGraphs:
    """The captured packed passes of one node. Owned by its pass graphs, whose counts it shares.

    On the CPU nothing is captured: the same step runs as it is, which is how it is tested there.
    """

    def __init__(
        self, spec: NodeSpec, module: KVModule, attention: AttentionBackend, tables: PageTables, captures: Captures,
        budget: int,
    ) -> None:  # fmt: skip
        enough = [size for size in sorted(spec.capture_tokens) if size >= budget][:1]
        self._sizes = [size for size in sorted(spec.capture_tokens) if size < budget] + enough
        self._name = spec.name
        self._module = module
        self._attention = attention
        self._tables = tables
        self._captures = captures
        self._inputs: dict[Kind, dict[str, Tensor]] = {}
        self._buckets: dict[Kind, dict[int, _Bucket]] = {}
        self._later: list[tuple[Kind, int]] = []

    @property
    def is_complete(self) -> bool:
        """Whether every bucket of every kind met so far is there."""
        return not self._later

    @property
    def sizes(self) -> list[int]:
        """Buckets that are there, in packed tokens."""
        return sorted({size for buckets in self._buckets.values() for size in buckets})

    def run(
        self, pieces: Sequence[ScheduledChunk]
    ) -> tuple[list[tuple[list[ScheduledChunk], dict[str, Tensor]]], list[ScheduledChunk]]:
        """Replay what graphs can take: batches with their packed outputs, tensors of their own; and what is left.

        Learns what could be captured but is not yet. A prefix that no graph took is counted as a miss.
        """
        done: list[tuple[list[ScheduledChunk], dict[str, Tensor]]] = []
        rest: list[ScheduledChunk] = []
        by_kind: dict[Kind, list[ScheduledChunk]] = {}
        for piece in pieces:
            kind = self._kind(piece)
            if kind is None:
                rest.append(piece)
            else:
                by_kind.setdefault(kind, []).append(piece)
        missed = False
        for kind, group in by_kind.items():
            self._learn(kind)
            for batch in self._batches(kind, group):
                bucket = self._bucket(kind, batch)
                if bucket is None:
                    rest += batch
                    missed = True
                else:
                    done.append((batch, self._replay(bucket, batch)))
        self._captures.counts.hits += len(done)
        self._captures.counts.misses += missed
        return done, rest

    def capture_next(self) -> bool:
        """Capture the largest bucket that is missing. True when more are left. One that does not fit is left out."""
        if self._later:
            kind, tokens = self._later.pop(0)
            name = f"prefix graph of {tokens} tokens"
            try:
                with torch.inference_mode():
                    self._captures.measured(name, lambda: self._make(kind, tokens))
            except torch.OutOfMemoryError as error:
                log.error("node %s goes on without its %s: %s", self._name, name, str(error).splitlines()[0])
            except Exception as error:  # noqa: BLE001 a module that cannot be captured still runs plainly
                self._later = [each for each in self._later if each[0] != kind]
                log.error("node %s runs prefixes plainly: %s: %s", self._name, type(error).__name__, error)
        return bool(self._later)

    def compile_later(self) -> None:
        """Run each bucket that is missing once, and keep nothing of it. See CompilesLater."""
        inputs = dict(self._inputs)
        try:
            for kind, tokens in self._later:
                self._step(self._new(kind, tokens))
        finally:
            self._inputs = inputs

    # -- choosing ----------------------------------------------------------------------------------------------------

    def _kind(self, piece: ScheduledChunk) -> Kind | None:
        """The kind of a pass that a graph could run: whole, unmasked, the first of its row, each input per token."""
        firing = piece.forward
        if not self._sizes or firing.is_ids or firing.given is not None or firing.per_row or piece.samples:
            return None
        if firing.attend.mask != "full" or not firing.attend.write or firing.attend.positions != "running":
            return None
        if piece.count != firing.tokens or firing.iterations > 1 or int(self._tables.length[piece.branch.slot]):
            return None
        found = []
        for name in sorted(firing.ports):
            value = firing.ports[name]
            if firing.axes[name] != 0 or value.shape[0] != firing.tokens:
                return None
            found.append((name, value.dtype, tuple(value.shape[1:])))
        return tuple(found)

    def _learn(self, kind: Kind) -> None:
        """Note the buckets of a kind that is met for the first time, the largest first: the others fit its memory."""
        if kind not in self._buckets and len(self._buckets) < KINDS:
            self._buckets[kind] = {}
            self._later += [(kind, tokens) for tokens in reversed(self._sizes)]

    def _batches(self, kind: Kind, pieces: Sequence[ScheduledChunk]) -> list[list[ScheduledChunk]]:
        """Divide passes, in order, among as few replays as the largest bucket allows."""
        largest = max(self._buckets.get(kind, ()), default=0)
        found: list[list[ScheduledChunk]] = []
        tokens = 0
        for piece in pieces:
            if not found or tokens + piece.count > largest or len(found[-1]) == rows_of(largest):
                found.append([])
                tokens = 0
            found[-1].append(piece)
            tokens += piece.count
        return found

    def _bucket(self, kind: Kind, pieces: Sequence[ScheduledChunk]) -> _Bucket | None:
        """The smallest bucket for these passes. Not one that is padded by more than a third: tokens cost time."""
        tokens, buckets = sum(piece.count for piece in pieces), self._buckets.get(kind, {})
        fits = (size for size in buckets if tokens <= size <= tokens * 3 // 2 and len(pieces) <= rows_of(size))
        found = min(fits, default=None)
        return None if found is None else buckets[found]

    # -- running -----------------------------------------------------------------------------------------------------

    def _replay(self, bucket: _Bucket, pieces: Sequence[ScheduledChunk]) -> dict[str, Tensor]:
        """One replay for these pieces. Returns the outputs that some of them want, packed, as tensors of their own."""
        total = sum(piece.count for piece in pieces)
        told = {"positions": pass_positions([piece.forward for piece in pieces])}
        late: list[tuple[list[Tensor], Tensor]] = []
        for name, target in bucket.ports.items():
            values = [piece.forward.ports[name] for piece in pieces]
            field = port_field(name)
            if field in bucket.block.device and all([value.is_cpu for value in values]):
                told[field] = host_array(torch.cat(values))
            else:
                late.append((values, target[:total]))
        counts = np.array([piece.count for piece in pieces], dtype=np.int64)
        rows = np.array([piece.branch.slot for piece in pieces], dtype=np.int64)
        prompts = PackedPrompts(rows=rows, counts=counts, cached=counts * 0, tables=self._tables.ids)
        self._send(bucket, prompts, told)
        for values, target in late:  # behind what was sent, which clears the rest of its fields
            join(values, target)
        if bucket.graph is not None:
            bucket.graph.replay()
        else:
            bucket.outputs = self._step(bucket)
        assert bucket.outputs is not None
        wanted = frozenset[str]().union(*(piece.wants for piece in pieces))
        return {name: value[:total].clone() for name, value in bucket.outputs.items() if name in wanted}

    def _send(self, bucket: _Bucket, prompts: PackedPrompts, told: Values) -> None:
        """Bring what a replay reads of the host to the device, with one copy."""
        bucket.block.send({**bucket.attention.values(prompts), **told})

    def _step(self, bucket: _Bucket) -> dict[str, Tensor]:
        """One forward over the bucket's buffers."""
        return self._module(kv=bucket.view, positions=bucket.block.device["positions"], **bucket.ports)

    # -- making ------------------------------------------------------------------------------------------------------

    def _make(self, kind: Kind, tokens: int) -> None:
        bucket = self._new(kind, tokens)
        bucket.graph, bucket.outputs = self._captures.graph(lambda: self._step(bucket))
        self._buckets[kind][tokens] = bucket

    def _new(self, kind: Kind, tokens: int) -> _Bucket:
        """A bucket with its buffers, and no graph yet."""
        device, rows = self._captures.device, rows_of(tokens)
        if kind not in self._inputs:
            most = max(self._sizes)
            self._inputs[kind] = {
                name: torch.zeros((most, *shape), dtype=dtype, device=device) for name, dtype, shape in kind if shape
            }
        attention = self._attention.fixed_packed(tokens, rows)
        numbers = {port_field(name): (dtype, tokens) for name, dtype, shape in kind if not shape}
        block = Block({**attention.fields, "positions": (torch.int64, tokens), **numbers}, device)
        ports = {name: value[:tokens] for name, value in self._inputs[kind].items()}
        ports |= {name: block.device[port_field(name)] for name, _, shape in kind if not shape}
        bucket = _Bucket(tokens, rows, attention, block, attention.view(block.device), ports)
        none = np.zeros(0, dtype=np.int64)
        self._send(bucket, PackedPrompts(rows=none, counts=none, cached=none, tables=self._tables.ids), {})
        return bucket


def rows_of(tokens: int) -> int:
    """Passes that a bucket of so many tokens takes."""
    return max(FEWEST_ROWS, tokens // TOKENS_PER_ROW)
