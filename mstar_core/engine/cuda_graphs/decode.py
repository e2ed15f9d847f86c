"""Decode steps as CUDA graphs, one per bucket of rows: ids in, ids out, nothing asked of the host. Used by the step.

A replay covers embedding, layers, head, penalty, draw, stop check and the update of the slots. Rows that a bucket does
not have run on a spare slot and a spare page. What a graph cannot do is left to the eager step, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mstar_core.engine.attention.static import FixedRows, Staging
from mstar_core.engine.cuda_graphs.buckets import Buckets, fill_parameters, parameter_fields
from mstar_core.engine.kv import advance
from mstar_core.engine.sampling import rng, sampler
from mstar_core.engine.sampling.logit_subset import Columns
from mstar_core.engine.sampling.sampler import SamplingRows

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cache.page_table import PageTables
    from mstar_core.engine.cache.slots import Slots
    from mstar_core.engine.cuda_graphs.buckets import Captures
    from mstar_core.engine.kv.batch import DecodeBatch
    from mstar_core.graph.spec.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule

BUCKETS: Final = Buckets(
    decode=(1, 8, 32),
    prefill=(128, 512),
    decode_later=(2, 4, 16, 24, 48, 64, 96, 128, 256),
    prefill_later=(64, 256, 384, 768, 1024, 1536, 2048),
)
"""What a deployment captures, up to its slots and its token budget; a step runs in the smallest that holds it."""


@dataclass(slots=True)
class _Bucket:
    """One graph with its buffers. members: the decode rows whose parameters the buffers hold."""

    rows: int
    attention: FixedRows
    staging: Staging
    parameters: Staging
    draw: Callable[[Tensor], Tensor]
    members: DecodeBatch | None = None
    graph: Any = None
    drawn: Tensor | None = None
    states: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class DecodeGraphs:
    """The captured decode steps of one node. Owned by its step runner.

    On the CPU nothing is captured: the same step runs as it is, which is how it is tested there.
    """

    def __init__(
        self, spec: NodeSpec, module: KVModule, make_rows: Callable[[int, int], FixedRows], slots: Slots,
        tables: PageTables, *, id_port: str, vocab: int, captures: Captures,
    ) -> None:  # fmt: skip
        assert spec.sampling is not None
        self._module = module
        self._make_rows = make_rows
        self._slots = slots
        self._tables = tables
        self._id_port = id_port
        self._columns = Columns(spec, vocab, slots.device)
        self._sees = spec.sampling.history != "none"
        self._stop_ids = slots.device_stop_ids
        self._captures = captures
        self._buckets: dict[int, _Bucket] = {}
        self._later: list[int] = []
        self.counts = captures.counts

    @property
    def sizes(self) -> list[int]:
        """Buckets that are there."""
        return sorted(self._buckets)

    def plan(self, buckets: Sequence[int]) -> None:
        """Note buckets to capture when asked to; of those that the slots cannot fill only the smallest."""
        wanted = sorted({*buckets} - {*self._buckets, *self._later})
        enough = [rows for rows in wanted if rows >= self._slots.count][:1]
        fits = [rows for rows in wanted if rows < self._slots.count] + enough
        if any(rows >= self._slots.count for rows in self._buckets):
            fits = [rows for rows in fits if rows < self._slots.count]
        self._later += fits

    @property
    def replans(self) -> int:
        """Attention plans that replays have made again."""
        return sum(bucket.attention.plans for bucket in self._buckets.values())

    @property
    def is_complete(self) -> bool:
        """Whether every planned bucket is there."""
        return not self._later

    def capture_next(self) -> bool:
        """Capture the next planned bucket. True when more are left."""
        if self._later:
            rows = self._later.pop(0)
            with torch.inference_mode():
                self._captures.measured(f"decode graph of {rows} rows", lambda: self._make(rows))
        return bool(self._later)

    def compile_later(self) -> None:
        """Run each planned bucket once, so that its capture, which a request may meet, compiles nothing."""
        for rows in self._later:
            self._step(self._new(rows))

    def takes(self, decode: DecodeBatch) -> bool:
        """Whether a graph can run this step; what it cannot do is counted as a miss."""
        if self._slots.device_stop_ids is not self._stop_ids:
            self._forget()
        fits = bool(self._buckets) and len(decode.slots) <= max(self._buckets)
        if fits and not (decode.reports or decode.has_rules):
            return True
        self.counts.misses += 1
        return False

    def run(self, decode: DecodeBatch) -> Tensor:
        """Run one step of these rows: int64 [n] on the device, overwritten by the next call."""
        count = len(decode.slots)
        bucket = self._buckets[min(rows for rows in self._buckets if rows >= count)]
        if bucket.members is not decode:
            self._enter(bucket, decode)
        slots, rows = self._slots, decode.slots
        host = bucket.staging.next()
        host["positions"][:count] = slots.next_position[rows]
        host["chance"][:count] = rng.uniform_host(bucket.states, slots.drawn[rows])
        bucket.staging.send("chance")
        bucket.attention.prepare(rows, self._tables.length[rows], self._tables.ids)
        if bucket.graph is not None:
            bucket.graph.replay()
        else:
            bucket.drawn = self._step(bucket)
        self.counts.hits += 1
        assert bucket.drawn is not None
        return bucket.drawn[:count]

    # -- making ------------------------------------------------------------------------------------------------------

    def _new(self, rows: int) -> _Bucket:
        """A bucket with its buffers, and no graph yet."""
        device = self._slots.device
        staging = Staging({"positions": (torch.int64, rows), "chance": (torch.float64, rows)}, device)
        parameters = Staging(parameter_fields(rows), device)
        attention = self._make_rows(rows, self._tables.ids.shape[1])
        bucket = _Bucket(rows, attention, staging, parameters, self._drawing(rows, staging, parameters))
        self._park(bucket)
        return bucket

    def _make(self, rows: int) -> None:
        bucket = self._new(rows)
        bucket.graph, bucket.drawn = self._captures.graph(lambda: self._step(bucket))
        self._buckets[rows] = bucket

    def _forget(self) -> None:
        """The stop ids moved to a wider array: graphs that read the old one are of no use, and are made again."""
        self._stop_ids = self._slots.device_stop_ids
        self._later = [*self.sizes, *self._later]
        self._buckets = {}
        if self._slots.device.type != "cuda":
            while self.capture_next():
                pass

    def _park(self, bucket: _Bucket) -> None:
        """Fill the buffers with rows that harm nobody."""
        bucket.members = None
        none = np.zeros(0, dtype=np.int64)
        fill_parameters(bucket.parameters.next(), none, [], self._slots.spare)
        bucket.parameters.send("greedy")
        host = bucket.staging.next()
        host["positions"][:] = 0
        host["chance"][:] = 0.0
        bucket.staging.send("chance")
        bucket.attention.prepare(none, none, self._tables.ids)

    def _enter(self, bucket: _Bucket, decode: DecodeBatch) -> None:
        """Bring the parameters of these rows into the buffers."""
        chosen = [self._slots.sampling[slot] for slot in decode.slots]
        bucket.states = fill_parameters(bucket.parameters.next(), decode.slots, chosen, self._slots.spare)
        bucket.parameters.send("greedy")
        bucket.members = decode

    # -- the step ----------------------------------------------------------------------------------------------------

    def _step(self, bucket: _Bucket) -> Tensor:
        """One decode step over the bucket's buffers. Returns what it drew: int64 [rows]."""
        slots, rows = self._slots, bucket.parameters.device["slots"]
        ports: dict[str, Tensor] = {self._id_port: advance.last_ids(slots, rows)}
        hidden = self._module(kv=bucket.attention.view, positions=bucket.staging.device["positions"], **ports)["hidden"]
        return advance.advance(slots, rows, bucket.draw(self._logits(hidden)), sees=self._sees)

    def drawer(self, rows: int, staging: Staging, parameters: Staging) -> Callable[[Tensor], Tensor]:
        """Hidden states [rows, width] to drawn ids int64 [rows], for the steps of other graphs of this node."""
        draw = self._drawing(rows, staging, parameters)
        return lambda hidden: draw(self._logits(hidden))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self._module.head(hidden)
        if self._slots.device.type != "cuda" and logits.dtype != torch.float32:
            logits = logits.to(torch.float32)
        # The kernels of the draw read any float type: no float32 copy of the logits is made for them.
        return self._columns.suppress(logits.contiguous())

    def _drawing(self, rows: int, staging: Staging, parameters: Staging) -> Callable[[Tensor], Tensor]:
        """The draw over these buffers: kernels of a fixed number on CUDA, the sampler itself on the CPU."""
        own, seen = parameters.device, self._slots.device_seen if self._sees else None
        chance, columns = staging.device["chance"], self._columns
        if self._slots.device.type == "cuda":
            from mstar_core.engine.sampling.top_p import NucleusSampler

            ids = None if columns.ids is None else columns.ids.to(torch.int32)
            nucleus = NucleusSampler(rows, columns.count, self._slots.device, ids)

            def fixed(logits: Tensor) -> Tensor:
                return nucleus.draw(
                    logits, seen=seen, slots=own["slots"], penalty=own["penalty"], temperature=own["temperature"],
                    top_p=own["top_p"], greedy=own["greedy"], chance=chance,
                )  # fmt: skip

            return fixed

        def plain(logits: Tensor) -> Tensor:
            marks = None if seen is None else columns.seen(seen.index_select(0, own["slots"]))
            return columns.drawn(sampler.sample_at(logits, _parameters(own), marks, chance))

        return plain


def _parameters(own: dict[str, Tensor]) -> SamplingRows:
    """The buffers as the sampler's parameters, with every optional rule allowed for."""
    rows, device = len(own["slots"]), own["slots"].device
    off = torch.full((rows, 1), 1 << 62, dtype=torch.int64, device=device)
    return SamplingRows(
        temperature=own["temperature"][:, None],
        top_p=own["top_p"][:, None],
        top_k=off,
        min_p=torch.zeros((rows, 1), dtype=torch.float64, device=device),
        penalty=own["penalty"][:, None],
        state=own["slots"],
        greedy=own["greedy"],
        all_greedy=False,
        any_greedy=True,
        is_penalised=True,
        has_bonus=True,
        has_top_k=False,
        has_min_p=False,
        has_whole=True,
    )
