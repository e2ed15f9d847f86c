"""Prompts as CUDA graphs, one per bucket of packed tokens: ids in, first ids out, nothing asked of the host.

A replay covers embedding, layers, the head on each prompt's last token, the draw and the update of the slots. Several
prompts share a bucket, chunks of long ones and prompts that begin in the prefix cache included. Used by the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mstar_core.engine.attention.segments import FixedSegments, PackedPrompts
from mstar_core.engine.attention.static import Staging
from mstar_core.engine.cuda_graphs.buckets import fill_parameters, parameter_fields
from mstar_core.engine.sampling import rng

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cache.page_table import PageTables
    from mstar_core.engine.cache.slots import Slots
    from mstar_core.engine.cuda_graphs.buckets import Captures
    from mstar_core.engine.cuda_graphs.decode import DecodeGraphs
    from mstar_core.engine.kv.batch import ScheduledChunk
    from mstar_core.graph.spec.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule

FEWEST_ROWS: Final = 8
TOKENS_PER_ROW: Final = 32
"""A bucket takes one prompt per so many tokens, but at least FEWEST_ROWS."""


@dataclass(slots=True)
class _Bucket:
    """One graph with its buffers."""

    tokens: int
    rows: int
    attention: FixedSegments
    staging: Staging
    draw: Callable[[Tensor], Tensor]
    graph: Any = None
    drawn: Tensor | None = None


class PrefillGraphs:
    """The captured prompts of one node. Owned by its step runner; draws as its decode graphs do.

    On the CPU nothing is captured: the same step runs as it is, which is how it is tested there.
    """

    def __init__(
        self, spec: NodeSpec, module: KVModule, make_segments: Callable[[int, int, int], FixedSegments], slots: Slots,
        tables: PageTables, *, id_port: str, decode: DecodeGraphs, captures: Captures,
    ) -> None:  # fmt: skip
        assert spec.sampling is not None
        self._module = module
        self._make_segments = make_segments
        self._slots = slots
        self._tables = tables
        self._id_port = id_port
        self._decode = decode
        self._sees = spec.sampling.history != "none"
        self._captures = captures
        self._buckets: dict[int, _Bucket] = {}
        self._later: list[int] = []
        self.counts = captures.counts

    @property
    def sizes(self) -> list[int]:
        """Buckets that are there, in packed tokens."""
        return sorted(self._buckets)

    def plan(self, buckets: Sequence[int], budget: int) -> None:
        """Note buckets to capture when asked to; of those that the token budget cannot fill only the smallest."""
        wanted = sorted({*buckets} - {*self._buckets, *self._later})
        known = [*self._buckets, *self._later]
        enough = [] if any(size >= budget for size in known) else [size for size in wanted if size >= budget][:1]
        self._later += [size for size in wanted if size < budget] + enough

    @property
    def is_complete(self) -> bool:
        """Whether every planned bucket is there."""
        return not self._later

    def capture_next(self) -> bool:
        """Capture the next planned bucket. True when more are left."""
        if self._later:
            tokens = self._later.pop(0)
            with torch.inference_mode():
                self._captures.measured(f"prompt graph of {tokens} tokens", lambda: self._make(tokens))
        return bool(self._later)

    def compile_later(self) -> None:
        """Run each planned bucket once, so that its capture, which a request may meet, compiles nothing."""
        for tokens in self._later:
            self._step(self._new(tokens))

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest bucket there is; 0 without one."""
        return max(self._buckets, default=0)

    @property
    def most_rows(self) -> int:
        """Prompts that the largest bucket takes; 0 without one."""
        return self._buckets[self.most_tokens].rows if self._buckets else 0

    def suits(self, piece: ScheduledChunk) -> bool:
        """Whether a graph could run this piece: plain ids that write, no output but the id, no rule without a graph."""
        firing, job = piece.forward, piece.job
        if not firing.is_ids or firing.attend.mask != "causal" or firing.attend.positions != "running":
            return False
        if not firing.attend.write or piece.wants or piece.count > self.most_tokens:
            return False
        if not piece.samples:
            return True
        params = self._slots.sampling[piece.branch.slot]
        # A general loop keeps its drawn id on the device, where the next replay would overwrite it.
        return (job is None or job.loop is None) and params.top_k <= 0 and params.min_p <= 0

    def batches(self, pieces: Sequence[ScheduledChunk]) -> list[list[ScheduledChunk]]:
        """Divide suitable pieces, in order, among as few replays as the largest bucket allows.

        Admission offers what fits one: more than two steps' replays of one bucket must never wait on the device.
        """
        largest = self._buckets[self.most_tokens]
        found: list[list[ScheduledChunk]] = []
        tokens = 0
        for piece in pieces:
            if not found or tokens + piece.count > largest.tokens or len(found[-1]) == largest.rows:
                found.append([])
                tokens = 0
            found[-1].append(piece)
            tokens += piece.count
        return found

    def run(self, pieces: Sequence[ScheduledChunk]) -> Tensor:
        """Run one batch: int64 [rows of the bucket] on the device, overwritten by the next replay of any graph.

        The id of a piece that samples is at its place among the pieces; the others' places hold nothing of use.
        """
        counts = np.array([piece.count for piece in pieces], dtype=np.int64)
        bucket = self._smallest(int(counts.sum()), len(pieces))
        rows = np.array([piece.branch.slot for piece in pieces], dtype=np.int64)
        prompts = PackedPrompts(rows=rows, counts=counts, cached=self._tables.length[rows], tables=self._tables.ids)
        self._fill(bucket, pieces, prompts)
        bucket.attention.prepare(prompts)
        if bucket.graph is not None:
            bucket.graph.replay()
        else:
            bucket.drawn = self._step(bucket)
        self.counts.prefill_hits += 1
        assert bucket.drawn is not None
        return bucket.drawn

    def _smallest(self, tokens: int, rows: int) -> _Bucket:
        return next(
            bucket for _, bucket in sorted(self._buckets.items()) if bucket.tokens >= tokens and bucket.rows >= rows
        )

    def _fill(self, bucket: _Bucket, pieces: Sequence[ScheduledChunk], prompts: PackedPrompts) -> None:
        """Bring ids, positions and the draw's parameters of these pieces into the buffers, with one copy."""
        host, slots, starts = bucket.staging.next(), self._slots, prompts.starts
        host["ids"][starts[-1] :] = host["positions"][starts[-1] :] = 0
        for start, piece in zip(starts, pieces, strict=False):
            firing, end = piece.forward, start + piece.count
            ids = firing.ports[self._id_port].narrow(0, firing.done, piece.count)
            host["ids"][start:end] = ids.numpy()
            first = firing.position + firing.done
            host["positions"][start:end] = np.arange(first, first + piece.count)
        host["ends"][:] = 0
        host["ends"][: len(pieces)] = starts[1:] - 1
        # A piece that does not sample draws as well, into the spare slot.
        drawing = np.array([piece.samples for piece in pieces], dtype=np.bool_)
        chosen = [slots.sampling[row] for row in prompts.rows]
        states = fill_parameters(host, np.where(drawing, prompts.rows, slots.spare), chosen, slots.spare)
        host["chance"][:] = 0.0
        host["chance"][: len(pieces)] = rng.uniform_host(states, slots.drawn[prompts.rows])
        bucket.staging.send("greedy")

    # -- making ------------------------------------------------------------------------------------------------------

    def _new(self, tokens: int) -> _Bucket:
        """A bucket with its buffers, and no graph yet."""
        rows = max(FEWEST_ROWS, tokens // TOKENS_PER_ROW)
        fields = {
            "ids": (torch.int64, tokens),
            "positions": (torch.int64, tokens),
            "ends": (torch.int64, rows),
            "chance": (torch.float64, rows),
        }
        staging = Staging(fields | parameter_fields(rows), self._slots.device)
        attention = self._make_segments(tokens, rows, self._tables.ids.shape[1])
        bucket = _Bucket(tokens, rows, attention, staging, self._decode.drawer(rows, staging, staging))
        none = np.zeros(0, dtype=np.int64)
        nobody = PackedPrompts(rows=none, counts=none, cached=none, tables=self._tables.ids)
        self._fill(bucket, [], nobody)
        attention.prepare(nobody)
        return bucket

    def _make(self, tokens: int) -> None:
        bucket = self._new(tokens)
        bucket.graph, bucket.drawn = self._captures.graph(lambda: self._step(bucket))
        self._buckets[tokens] = bucket

    def _step(self, bucket: _Bucket) -> Tensor:
        """One forward over the bucket's buffers. Returns what it drew: int64 [rows]."""
        slots, own = self._slots, bucket.staging.device
        ports: dict[str, Tensor] = {self._id_port: own["ids"]}
        hidden = self._module(kv=bucket.attention.view, positions=own["positions"], **ports)["hidden"]
        drawn = bucket.draw(hidden.index_select(0, own["ends"]))
        slots.device_last.index_copy_(0, own["slots"], drawn)
        if self._sees:
            flat = own["slots"] * slots.device_seen.shape[1] + drawn.clamp(min=0)
            slots.device_seen.view(-1).index_fill_(0, flat, True)
        return drawn
