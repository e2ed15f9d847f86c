"""Decode steps as CUDA graphs, one per bucket of rows: ids in, ids out, nothing asked of the host. Used by the step.

A replay covers embedding, layers, head, penalty, draw, stop check and the update of the slots. Rows that a bucket does
not have run on a spare slot and a spare page. What a graph cannot do is left to the eager step, and counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mstar_core.engine import rng, sampler
from mstar_core.engine.attention.static import FixedRows, Staging
from mstar_core.engine.sampler import SamplingRows

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.kv_step import DecodeRows
    from mstar_core.engine.kv_view import KVModule
    from mstar_core.engine.page_table import PageTables
    from mstar_core.engine.slots import Slots
    from mstar_core.graph.nodes import NodeSpec

log = logging.getLogger(__name__)

BUCKETS: Final = (1, 8, 32, 64, 128, 256)
"""Rows that a graph is captured for, up to the slots there are; a batch runs in the smallest that holds it."""

WARM_UPS: Final = 2


@dataclass(slots=True)
class GraphCounts:
    """hits: steps that were replayed; misses: decode steps that a graph could not take; captured: graphs made.

    capture_s: time that capturing took. replans: attention plans made since the start.
    """

    hits: int = 0
    misses: int = 0
    captured: int = 0
    capture_s: float = 0.0


@dataclass(slots=True)
class _Bucket:
    """One graph with its buffers. members: the decode rows whose parameters the buffers hold."""

    rows: int
    attention: FixedRows
    staging: Staging
    parameters: Staging
    draw: Callable[[Tensor], Tensor]
    members: DecodeRows | None = None
    graph: Any = None
    drawn: Tensor | None = None
    states: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class DecodeGraphs:
    """The captured decode steps of one node. Owned by its step runner.

    On the CPU nothing is captured: the same step runs as it is, which is how it is tested there.
    """

    def __init__(
        self, spec: NodeSpec, module: KVModule, make_rows: Callable[[int, int], FixedRows], slots: Slots,
        tables: PageTables, *, id_port: str, vocab: int,
    ) -> None:  # fmt: skip
        assert spec.sampling is not None
        self._module = module
        self._make_rows = make_rows
        self._slots = slots
        self._tables = tables
        self._id_port = id_port
        self._vocab = vocab
        self._suppress = spec.sampling.suppress
        self._sees = spec.sampling.history != "none"
        self._stop_ids = slots.device_stop_ids
        self._buckets: dict[int, _Bucket] = {}
        self._pool: Any = None
        self.counts = GraphCounts()

    @property
    def sizes(self) -> list[int]:
        """Buckets that are there."""
        return sorted(self._buckets)

    def capture(self, buckets: Sequence[int] = BUCKETS) -> None:
        """Capture a graph for each bucket that the slots can fill; the last one may be larger than they are many."""
        with torch.inference_mode():
            for rows in buckets:
                if rows not in self._buckets:
                    self._buckets[rows] = self._made(rows)
                if rows >= self._slots.count:
                    return

    def takes(self, decode: DecodeRows) -> bool:
        """Whether a graph can run this step; what it cannot do is counted as a miss."""
        if self._slots.device_stop_ids is not self._stop_ids:
            self._capture_again()
        sampling = decode.sampling
        fits = bool(self._buckets) and len(decode.slots) <= max(self._buckets)
        if fits and not (decode.reports or sampling.has_top_k or sampling.has_min_p):
            return True
        self.counts.misses += 1
        return False

    def run(self, decode: DecodeRows) -> Tensor:
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

    def _made(self, rows: int) -> _Bucket:
        device, started = self._slots.device, time.monotonic()
        staging = Staging({"positions": (torch.int64, rows), "chance": (torch.float64, rows)}, device)
        parameters = Staging(
            {
                "slots": (torch.int64, rows),
                "top_p": (torch.float64, rows),
                "temperature": (torch.float32, rows),
                "penalty": (torch.float32, rows),
                "greedy": (torch.bool, rows),
            },
            device,
        )
        attention = self._make_rows(rows, self._tables.ids.shape[1])
        bucket = _Bucket(rows, attention, staging, parameters, self._drawing(rows, staging, parameters))
        self._park(bucket)
        if device.type == "cuda":
            self._capture(bucket)
        self.counts.captured += 1
        self.counts.capture_s += time.monotonic() - started
        log.info("decode graph of %d rows: %.2f s", rows, time.monotonic() - started)
        return bucket

    def _capture(self, bucket: _Bucket) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._step(bucket)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            bucket.drawn = self._step(bucket)
        self._pool = self._pool or graph.pool()
        bucket.graph = graph

    def _capture_again(self) -> None:
        """The stop ids moved to a wider array: graphs that read the old one are of no use."""
        self._stop_ids = self._slots.device_stop_ids
        sizes, self._buckets, self._pool = self.sizes, {}, None
        self.capture(sizes)

    def _park(self, bucket: _Bucket) -> None:
        """Fill the buffers with rows that harm nobody."""
        bucket.members = None
        host = bucket.parameters.next()
        host["slots"][:] = self._slots.spare
        host["top_p"][:] = 2.0
        host["temperature"][:] = host["penalty"][:] = 1.0
        host["greedy"][:] = True
        bucket.parameters.send("greedy")
        host = bucket.staging.next()
        host["positions"][:] = 0
        host["chance"][:] = 0.0
        bucket.staging.send("chance")
        none = np.zeros(0, dtype=np.int64)
        bucket.attention.prepare(none, none, self._tables.ids)

    def _enter(self, bucket: _Bucket, decode: DecodeRows) -> None:
        """Bring the parameters of these rows into the buffers."""
        count = len(decode.slots)
        chosen = [self._slots.sampling[slot] for slot in decode.slots]
        host = bucket.parameters.next()
        host["slots"][:count], host["slots"][count:] = decode.slots, self._slots.spare
        host["top_p"][:] = 2.0
        host["top_p"][:count] = [2.0 if each.top_p >= 1 else each.top_p for each in chosen]
        host["temperature"][:] = 1.0
        host["temperature"][:count] = [1.0 if each.temperature <= 0 else each.temperature for each in chosen]
        host["penalty"][:] = 1.0
        host["penalty"][:count] = [each.repetition_penalty for each in chosen]
        host["greedy"][:] = True
        host["greedy"][:count] = [each.temperature <= 0 for each in chosen]
        bucket.parameters.send("greedy")
        seeds = torch.tensor([sampler.to_int64(each.seed) for each in chosen], dtype=torch.int64)
        bucket.states = rng.seeded(seeds).numpy()
        bucket.members = decode

    # -- the step ----------------------------------------------------------------------------------------------------

    def _step(self, bucket: _Bucket) -> Tensor:
        """One decode step over the bucket's buffers. Returns what it drew: int64 [rows]."""
        slots, rows = self._slots, bucket.parameters.device["slots"]
        last = slots.device_last.index_select(0, rows)
        # A row without an id yet has none to look up; the spare slot is such a row.
        ports: dict[str, Tensor] = {self._id_port: last.clamp(min=0)}
        hidden = self._module(kv=bucket.attention.view, positions=bucket.staging.device["positions"], **ports)["hidden"]
        logits = self._module.head(hidden)
        if logits.dtype != torch.float32 or not logits.is_contiguous():
            logits = logits.to(torch.float32).contiguous()
        for span in self._suppress:
            logits[:, span.start : span.stop] = float("-inf")
        ids = bucket.draw(logits)
        stopped = slots.device_stopped.index_select(0, rows)
        drawn = torch.where(stopped, last, ids)
        hit = (drawn[:, None] == self._stop_ids.index_select(0, rows)).any(dim=1)
        slots.device_stopped.index_copy_(0, rows, stopped | hit)
        slots.device_last.index_copy_(0, rows, drawn)
        if self._sees:
            flat = rows * slots.device_seen.shape[1] + drawn.clamp(min=0)
            slots.device_seen.view(-1).index_fill_(0, flat, True)
        return drawn

    def _drawing(self, rows: int, staging: Staging, parameters: Staging) -> Callable[[Tensor], Tensor]:
        """The draw over these buffers: kernels of a fixed number on CUDA, the sampler itself on the CPU."""
        own, seen = parameters.device, self._slots.device_seen if self._sees else None
        chance = staging.device["chance"]
        if self._slots.device.type == "cuda":
            from mstar_core.engine.nucleus import NucleusSampler

            nucleus = NucleusSampler(rows, self._vocab, self._slots.device)

            def fixed(logits: Tensor) -> Tensor:
                return nucleus.draw(
                    logits, seen=seen, slots=own["slots"], penalty=own["penalty"], temperature=own["temperature"],
                    top_p=own["top_p"], greedy=own["greedy"], chance=chance,
                )  # fmt: skip

            return fixed

        def plain(logits: Tensor) -> Tensor:
            return sampler.sample_at(
                logits, _columns(own), None if seen is None else seen.index_select(0, own["slots"]), chance
            )

        return plain


def _columns(own: dict[str, Tensor]) -> SamplingRows:
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
