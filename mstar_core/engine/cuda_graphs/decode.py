"""Captured decode steps, one bucket per number of sequences: from last ids to drawn ids without a host decision.

A replay covers embedding, layers, head, penalty, draw, stop check and the update of the slots. At a node whose loop has
values per sequence it also gathers these before the module and stores the new state. Padding runs on a spare slot and a
spare page. Used by the model runner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.attention.staging import Staging
from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.cache import slot_update
from mstar_core.engine.cuda_graphs.cache import Size, StaticStep
from mstar_core.engine.sampling.columns import columns, fields, states
from mstar_core.engine.sampling.sampler import Sampler
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
from mstar_core.layers import rng

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.cache.loop_rows import LoopRows
    from mstar_core.engine.cache.page_table import PageTables
    from mstar_core.engine.cache.slots import Slots
    from mstar_core.engine.cuda_graphs.cache import GraphCache
    from mstar_core.engine.kv.batch import DecodeBatch
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule

DRAWN: Final = "$drawn"
"""Key of the drawn ids among the outputs of a decode step; the other keys are the module's ports."""

DECODE: Final = b"decode"
"""Kind of these steps on the wire."""

DECODE_ADJUSTING: Final = b"decode adjusting"
"""Kind of their variant that adjusts logits."""

_NONE: Final = np.zeros(0, dtype=np.int64)


class DecodeStep(StaticStep[dict[str, "Tensor"]]):
    """One decode step of up to `count` sequences. adjusting: the variant that adjusts logits before the draw."""

    def __init__(self, node: DecodeSteps, count: int, *, adjusting: bool = False) -> None:
        self._node = node
        self._count = count
        self._adjusting = adjusting
        if adjusting:
            node.slots.device_counts()  # a capture must not allocate them
        device = node.slots.device
        self._parameters = Staging({"slots": (torch.int64, count), **fields(count, adjusting=adjusting)}, device)
        shape = AttentionShape(sequences=count, tokens=1, pages=node.tables.ids.shape[1], causal=True)
        own = {"positions": (node.slots.position_dtype, count), "chance": (torch.float64, count)}
        if node.rows is not None:
            own |= node.rows.fields(count)
        self.buffers = AttentionBuffers(node.attention.static(shape), device, own)
        self._batch: DecodeBatch | None = None
        self._states = self._random = _NONE
        self.park()

    @property
    def inlets(self) -> Sequence[Staging | AttentionBuffers]:
        return (self._parameters, self.buffers)

    def park(self) -> None:
        """Fill the buffers with values that touch the spare slot and page only."""
        self._load_parameters(None)
        self._load(_NONE, _NONE)

    def load(self, batch: DecodeBatch) -> None:
        """Fill the buffers for a batch; sampling parameters only if its membership changed."""
        if self._batch is not batch:
            self._load_parameters(batch)
        slots = self._node.slots
        self._load(batch.slots, rng.uniform_host(self._states, slots.drawn[batch.slots]))

    def _load(self, rows: np.ndarray, chance: np.ndarray) -> None:
        tables = self._node.tables
        metadata = AttentionMetadata.of(rows, tables.length[rows], tables.ids)
        values = {"positions": self._node.slots.next_position[rows], "chance": chance}
        if self._node.rows is not None:
            values |= self._node.rows.values(rows, self._random)
        self.buffers.prepare(metadata, values)

    def _load_parameters(self, batch: DecodeBatch | None) -> None:
        slots = self._node.slots
        rows = _NONE if batch is None else batch.slots
        params = [slots.sampling[row] for row in rows]
        self._states = states(params)
        padded = np.full(self._count, slots.spare, dtype=np.int64)
        padded[: len(rows)] = rows
        self._parameters.put({"slots": padded, **columns(params, self._count, adjusting=self._adjusting)})
        if self._node.rows is not None:
            self._random = self._node.rows.random_states(rows)
        self._batch = batch

    def forward(self) -> dict[str, Tensor]:
        """Run the step. Returns the drawn ids, int64 [count], and the module's outputs of one row per sequence."""
        node, rows = self._node, self._parameters.device["slots"]
        ports = {node.id_port: slot_update.next_ids(node.slots, rows)}
        if node.rows is not None:
            ports = node.rows.inputs(rows, self.buffers.device) | {node.rows.ports.id_port: ports[node.id_port]}
        self.buffers.reset()
        outputs = node.module(kv=self.buffers.view, positions=self.buffers.device["positions"], **ports)
        self.buffers.reset()
        drawn = self.draw(node.module.head(outputs["hidden"]))
        if node.rows is not None:
            node.rows.store(rows, ports, outputs, node.slots.device_stopped.index_select(0, rows))
        kept = {port: value for port, value in outputs.items() if value.dim() and value.shape[0] == self._count}
        return {**kept, DRAWN: node.sampler.store(self._parameters.device, rows, drawn, tracked=self._count)}

    def draw(self, logits: Tensor) -> Tensor:
        """Draw ids from logits [count, columns] at this step's points: int64 [count]."""
        columns = self._parameters.device
        return self._node.sampler.draw(logits, columns, self.buffers.device["chance"], columns["slots"])


class DecodeSteps:
    """The captured decode steps of one node. Owned by its `NodeGraphs`.

    adjusting: variants that adjust logits, captured on demand. A batch runs one if a sequence of it needs it.
    """

    def __init__(
        self,
        spec: NodeSpec,
        module: KVModule,
        attention: AttentionBackend,
        slots: Slots,
        tables: PageTables,
        *,
        id_port: str,
        cache: GraphCache,
        rows: LoopRows | None = None,
    ) -> None:
        assert spec.sampling is not None
        self.module = module
        self.attention = attention
        self.slots = slots
        self.tables = tables
        self.rows = rows
        self.id_port = id_port
        self.sampler = Sampler(spec, slots)
        self.counts = cache.counts
        self.buckets = cache.buckets(
            lambda size: DecodeStep(self, size[0]),
            lambda size: f"decode graph of {size[0]} sequences",
            lambda size: (1, -size[0]),
            DECODE,
        )
        self.adjusting = cache.buckets(
            lambda size: DecodeStep(self, size[0], adjusting=True),
            lambda size: f"decode graph of {size[0]} sequences that adjusts logits",
            lambda size: (1, -size[0]),
            DECODE_ADJUSTING,
        )
        self._stop_ids = slots.device_stop_ids

    @property
    def sizes(self) -> list[int]:
        """Captured buckets, in sequences."""
        return [count for (count,) in self.buckets.sizes]

    def plan(self, sizes: Iterable[int]) -> None:
        """Queue captures. Of the sizes that the slots cannot fill only the smallest is taken."""
        self.buckets.plan(up_to(self.slots.count, sizes, [*self.buckets.sizes, *self.buckets.planned]))

    def replayable(self, batch: DecodeBatch) -> list[DecodeBatch]:
        """Return the batches whose replays run this one, empty if nothing is captured.

        A batch beyond the largest bucket takes several replays, which are faster than an uncaptured step. It counts as
        a miss, and so does one without a bucket.
        """
        if self._stop_ids is not self.slots.device_stop_ids:  # they moved to a wider array
            self._stop_ids = self.slots.device_stop_ids
            self.buckets.rebuild()
            self.adjusting.rebuild()
        largest = self.buckets.largest
        parts = [] if largest is None else batch.split(largest[0], self.slots)
        if batch.adjusts and not all([self._has_bucket(part) for part in parts]):  # a list: all are requested
            parts = []
        self.counts.misses += len(parts) != 1
        return parts

    def _has_bucket(self, batch: DecodeBatch) -> bool:
        """Return whether a part of a batch has a bucket. A variant that is missing is requested."""
        if batch.adjusts:
            self.adjusting.request(next(size for size in self.buckets.sizes if size[0] >= len(batch.slots)))
        return self._bucket(batch) is not None

    def _bucket(self, batch: DecodeBatch) -> DecodeStep | None:
        return (self.adjusting if batch.adjusts else self.buckets).smallest(len(batch.slots))

    def run(self, batch: DecodeBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Run one step.

        Returns the drawn ids, int64 [n], which the next run overwrites, and copies of the ports that loops report.
        """
        count, step = len(batch.slots), self._bucket(batch)
        assert step is not None, "`replayable` has found a bucket"
        plans = step.buffers.attention.plans
        step.load(batch)
        outputs = step.run()
        self.counts.hits += 1
        self.counts.replans += step.buffers.attention.plans - plans
        reported = {port: outputs[port][:count].clone() for port in batch.reports if port in outputs}
        return outputs[DRAWN][:count], reported


def up_to(most: int, sizes: Iterable[int], known: Iterable[Size]) -> list[Size]:
    """Return the sizes below `most` and the smallest that reaches it, unless a known bucket does."""
    wanted = sorted(sizes)
    reaching = [] if any(size[0] >= most for size in known) else [size for size in wanted if size >= most][:1]
    return [(size,) for size in [*(size for size in wanted if size < most), *reaching]]
