"""Captured decode steps, one bucket per number of sequences: from last ids to drawn ids without a host decision.

The case of the ragged step with one token per sequence and resident rows: a replay covers embedding, layers, head,
penalty, draw, stop check and the update of the slots. A masking step is two graphs, because its masks are computed
while the device runs the first one. At a node whose loop has values per sequence it also gathers these before the
module and stores the new state. Padding runs on a spare slot and a spare page.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import torch

from mstar_core.engine.attention.staging import Staging
from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.base import NO_ADAPTER
from mstar_core.engine.cuda_graphs.cache import StaticStep, up_to
from mstar_core.engine.cuda_graphs.kinds import decode_kind, variant_text
from mstar_core.engine.cuda_graphs.ragged import DRAWN
from mstar_core.engine.sampling.columns import columns, fields, states
from mstar_core.engine.sampling.masks import MASK_ROWS, MASKS, padded_rows
from mstar_core.engine.sampling.masks import fields as mask_fields
from mstar_core.engine.slack import StepCost
from mstar_core.engine.steps.adapters import adapter_fields, adapter_values, applying
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
from mstar_core.engine.steps.head import head_logits
from mstar_core.engine.steps.plan import DecodeBatch, DecodePlan
from mstar_core.layers import rng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import GraphCache, StepBuckets
    from mstar_core.engine.cuda_graphs.ragged import CapturedNode
    from mstar_core.engine.device_state.loop_values import DeviceLoopValues
    from mstar_core.engine.marks import Mark
    from mstar_core.engine.steps.masks import Masks

TIMED: Final = (16, 4)
"""Of so many replays of a bucket, this one is timed: the first ones are slower."""

_NONE: Final = np.zeros(0, dtype=np.int64)


class _Computed(NamedTuple):
    """Results of the layers, on the device. ports: their inputs. logits: [count, columns]."""

    ports: dict[str, Tensor]
    outputs: dict[str, Tensor]
    logits: Tensor


class DecodeStep(StaticStep[dict[str, "Tensor"]]):
    """One decode step of up to `count` sequences.

    cost: its time on the device; replays: how often it has run. adjusts: the variant that adjusts logits before the
    draw. masks: the variant that draws by masks; its `forward` ends with the logits, and `masked` is the rest.
    """

    def __init__(self, steps: DecodeSteps, count: int, *, adjusts: bool = False, masks: bool = False) -> None:
        self._steps = steps
        self._count = count
        self._adjusts = adjusts
        self.cost, self.replays = StepCost(), 0
        node = steps.node
        slots = node.slots
        if adjusts:
            slots.counts()  # a capture must not allocate them
        parameters = {"slots": (torch.int64, count), **fields(count, adjusting=adjusts)}
        self._masks: Staging | None = None
        if masks:
            parameters[MASK_ROWS] = (torch.int32, count)
            self._masks = Staging(mask_fields(count, slots.vocab), node.device)
        self.masked = MaskedDraw(self) if masks else None
        self._computed: _Computed | None = None
        self._parameters = Staging({**adapter_fields(node.adapters, count), **parameters}, node.device)
        shape = AttentionShape(sequences=count, tokens=1, pages=node.pages, causal=True)
        beside = {"positions": (slots.position_dtype, count), "chance": (torch.float64, count)}
        if steps.values is not None:
            beside |= steps.values.fields(count)
        memory = node.attention.static(shape) if node.has_memory else None
        self.buffers = AttentionBuffers(node.attention.static(shape), node.device, beside, memory)
        self._batch: DecodeBatch | None = None
        self._states = self._random = _NONE
        self.park()

    def park(self) -> None:
        """Fill the buffers with values that touch the spare slot and page only."""
        batch = DecodeBatch(version=0, slots=_NONE, sampling=())
        self.load(
            DecodePlan(batch=batch, lengths=_NONE, positions=_NONE, drawn=_NONE, items=_NONE),
            self._steps.node.no_tables,
        )

    def load(self, plan: DecodePlan, tables: np.ndarray) -> None:
        """Fill the buffers for a step; sampling parameters only if the batch's membership changed."""
        self._load_batch(plan, tables)
        values = self._values(plan, rng.uniform_host(self._states, plan.drawn))
        self.buffers.prepare(_metadata(plan, tables), values)

    def load_each(self, plan: DecodePlan, tables: np.ndarray) -> Iterator[None]:
        """Fill the buffers for each token of a plan of several, in turn. Yields where it has to be run.

        Cost model: a token after the first adds one small copy to the device, and page lists only where a page begins.
        """
        self._load_batch(plan, tables)
        chances = rng.uniform_host(self._states, plan.drawn + np.arange(plan.steps)[:, None])
        for number, each in enumerate(plan.each()):
            values, more = self._values(each, chances[number]), number + 1 < plan.steps
            if number:
                self.buffers.prepare_next(partial(_metadata, each, tables), values, more=more)
            else:
                self.buffers.prepare(_metadata(each, tables), values, more=more)
            yield

    def _load_batch(self, plan: DecodePlan, tables: np.ndarray) -> None:
        if self._batch is not plan.batch:
            self._load_parameters(plan.batch)
            self.buffers.prepare_memory(_metadata(plan, tables, plan.batch.memory))

    def _values(self, plan: DecodePlan, chance: np.ndarray) -> dict[str, np.ndarray]:
        """Return the host values of a step beside those of attention. chance: float64 [n]."""
        values = {"positions": plan.positions, "chance": chance}
        if self._steps.values is not None:
            values |= self._steps.values.values(plan, self._random)
        return values

    def _load_parameters(self, batch: DecodeBatch) -> None:
        self._states = states(batch.sampling)
        slots = np.full(self._count, self._steps.node.slots.spare, dtype=np.int64)
        slots[: len(batch.slots)] = batch.slots
        values = {"slots": slots, **columns(batch.sampling, self._count, adjusting=self._adjusts)}
        if self._masks is not None:
            values |= padded_rows(batch.mask_rows, self._count)
        if self._steps.node.adapters is not None:
            values |= adapter_values(batch.adapters)
        self._parameters.put(values)
        if self._steps.values is not None:
            self._random = self._steps.values.random_states(batch)
        self._batch = batch

    def load_masks(self, masks: Masks) -> None:
        """Copy masks to the device, after the layers were launched."""
        assert self._masks is not None
        self._masks.put({MASKS: masks.bits})

    def capture(self, cache: GraphCache) -> None:
        """Capture the step, and its masked draw as a graph behind it."""
        super().capture(cache)
        if self.masked is not None:
            self.run()  # the draw is warmed up on logits that the layers have given
            self.masked.capture(cache)

    def warm_up(self) -> None:
        """Run the step once."""
        self.forward()
        if self.masked is not None:
            self.masked.forward()

    def forward(self) -> dict[str, Tensor]:
        """Run the step, a masking one up to its logits. Returns the outputs of `drawn`, or nothing yet."""
        self._computed = self._compute()
        return self.drawn() if self.masked is None else {}

    def _compute(self) -> _Computed:
        node, loop_values, slots = self._steps.node, self._steps.values, self._parameters.device["slots"]
        ids = node.slots.next_ids(slots)
        ports = {self._steps.id_port: ids}
        if loop_values is not None:
            ports = loop_values.inputs(slots, self.buffers.device) | {loop_values.ports.id_port: ids}
        self.buffers.reset()
        with applying(node.adapters, self._parameters.device):
            outputs = node.module(kv=self.buffers.view, positions=self.buffers.device["positions"], **ports)
        self.buffers.reset()
        return _Computed(ports, outputs, head_logits(node.module, outputs))

    def drawn(self) -> dict[str, Tensor]:
        """Draw from the logits. Returns the ids, int64 [count], and the module's outputs of one row per sequence."""
        assert self._computed is not None
        ports, outputs, logits = self._computed
        node, loop_values, slots = self._steps.node, self._steps.values, self._parameters.device["slots"]
        drawn = self._draw(logits)
        if loop_values is not None:
            loop_values.store(slots, ports, outputs, node.slots.stopped.index_select(0, slots))
        kept = {port: value for port, value in outputs.items() if value.dim() and value.shape[0] == self._count}
        return {**kept, DRAWN: node.draws.store(self._parameters.device, slots, drawn, tracked=self._count)}

    def _draw(self, logits: Tensor) -> Tensor:
        """Draw ids from logits [count, columns] at this step's points: int64 [count]."""
        values = self._parameters.device
        if self._masks is not None:
            values = {**values, MASKS: self._masks.device[MASKS].view(self._count, -1)}
        return self._steps.node.draws.draw(logits, values, self.buffers.device["chance"], values["slots"])


def _metadata(plan: DecodePlan, tables: np.ndarray, memory: np.ndarray | None = None) -> AttentionMetadata:
    return AttentionMetadata.of(plan.batch.slots, plan.lengths, tables, memory=memory)


class MaskedDraw(StaticStep[dict[str, "Tensor"]]):
    """The draw of a masking step. It reads the logits of the step's own graph, which therefore stay allocated."""

    def __init__(self, step: DecodeStep) -> None:
        self._step = step

    def forward(self) -> dict[str, Tensor]:
        """See `DecodeStep.drawn`."""
        return self._step.drawn()


class DecodeSteps:
    """The captured decode steps of one node. Owned by its `NodeGraphs`.

    variants: by whether they adjust logits and whether they mask ids; buckets: those of the default step. The others
    are captured on demand, and a batch runs one if a sequence of it needs it.
    """

    def __init__(
        self,
        node: CapturedNode,
        cache: GraphCache,
        *,
        id_port: str,
        mark: Callable[[], Mark],
        values: DeviceLoopValues | None = None,
    ) -> None:
        """mark: see NodeGraphs. values: of the node's resident loop, None if it carries only its id."""
        self.node = node
        self._mark = mark
        self.values = values
        self.id_port = id_port
        self.counts = cache.counts
        self.variants = {
            (adjusts, masks): self._variant(cache, adjusts=adjusts, masks=masks)
            for adjusts in (False, True)
            for masks in (False, True)
        }
        self.buckets = self.variants[False, False]
        self._stop_ids = node.slots.stop_ids
        self._parts: tuple[DecodeBatch | None, list[DecodeBatch]] = (None, [])

    def _variant(self, cache: GraphCache, *, adjusts: bool, masks: bool) -> StepBuckets[DecodeStep]:
        """Make the buckets of a variant, of which there are none yet."""
        does = variant_text(adjusts=adjusts, masks=masks)
        return cache.buckets(
            lambda size: DecodeStep(self, size[0], adjusts=adjusts, masks=masks),
            lambda size: f"decode graph of {size[0]} sequences{does}",
            lambda size: (1, -size[0]),
            decode_kind(self.node.slots.position_dtype, adjusts=adjusts, masks=masks),
        )

    @property
    def sizes(self) -> list[int]:
        """Captured buckets, in sequences."""
        return [count for (count,) in self.buckets.sizes]

    def plan(self, sizes: Iterable[int]) -> None:
        """Queue captures. Of the sizes that the slots cannot fill only the smallest is taken."""
        self.buckets.plan(up_to(self.node.slots.count, sizes, [*self.buckets.sizes, *self.buckets.planned]))

    def request_masking(self) -> None:
        """Request the masking step of the largest bucket, so that the first grammars of a busy node meet one."""
        if self.buckets.largest is not None:
            self.variants[False, True].request(self.buckets.largest)

    def replayable(self, plan: DecodePlan) -> list[DecodePlan]:
        """Return the plans whose replays run this one, empty if nothing is captured.

        A batch beyond the largest bucket takes several replays, which are faster than an uncaptured step. It counts as
        a miss, and so does one without a bucket. A batch that reports log-probabilities runs uncaptured.
        """
        if self._stop_ids is not self.node.slots.stop_ids:  # they moved to a wider array
            self._stop_ids = self.node.slots.stop_ids
            for variant in self.variants.values():
                variant.rebuild()
        largest = None if plan.batch.scores else self.buckets.largest
        parts = [] if largest is None else [plan] if len(plan) <= largest[0] else list(self._split(plan, largest[0]))
        if any(plan.variant) and not all([self._has_bucket(part) for part in parts]):  # a list: all are requested
            parts = []
        if len(parts) != 1:
            self.counts.misses += 1
            if not any(plan.variant) and not plan.batch.scores:
                self.buckets.missed(len(plan))
        return parts

    def _has_bucket(self, plan: DecodePlan) -> bool:
        """Return whether a part of a batch has a bucket. A variant that is missing is requested."""
        if any(plan.variant):
            self.variants[plan.variant].request(next(size for size in self.buckets.sizes if size[0] >= len(plan)))
        return self._bucket(plan) is not None

    def step_s(self, batch: DecodeBatch) -> float:
        """See `Device.decode_step_s`."""
        largest = self.buckets.largest
        if largest is None:
            return 0.0
        whole, rest = divmod(len(batch.slots), largest[0])
        steps = [self.variants[batch.adjusts, False].smallest(count) for count in (*largest * whole, rest) if count]
        times = [step.cost.settled_s() for step in steps if step is not None]
        return sum(times) if len(times) == len(steps) and all(times) else 0.0

    def _replay(self, step: DecodeStep) -> dict[str, Tensor]:
        """Run a step, and measure its time now and then: that of the device, without the host's work before it."""
        step.replays += 1
        every, number = TIMED
        if step.replays % every != number:
            return step.run()
        step.cost.settle()
        work = step.cost.begin(self._mark(), units=0, yielding=0)
        outputs = step.run()
        work.end = self._mark()
        return outputs

    def _bucket(self, plan: DecodePlan) -> DecodeStep | None:
        return self.variants[plan.variant].smallest(len(plan))

    def run(self, plan: DecodePlan, tables: np.ndarray) -> tuple[Tensor, dict[str, Tensor], tuple[str, ...]]:
        """Run one step. tables: see StepPlan.

        Returns the drawn ids, int64 [n], which the next run overwrites, copies of the ports that loops report, and the
        names of all outputs with one row per sequence. A plan of several tokens draws int64 [steps, n] and reports
        nothing.
        """
        count = len(plan)
        step = self._bucket(plan)
        assert step is not None, "`replayable` has found a bucket"
        plans = step.buffers.attention.plans
        if plan.steps > 1:
            drawn, given = self._run_each(step, plan, tables)
            self.counts.replans += step.buffers.attention.plans - plans
            return drawn, {}, given
        step.load(plan, tables)
        outputs = self._replay(step)
        if step.masked is not None and plan.masks is not None:
            step.load_masks(plan.masks)
            outputs = step.masked.run()
        self.counts.hits += 1
        self.counts.replans += step.buffers.attention.plans - plans
        reported = {port: outputs[port][:count].clone() for port in plan.batch.reports if port in outputs}
        return outputs[DRAWN][:count], reported, tuple(outputs)

    def _run_each(self, step: DecodeStep, plan: DecodePlan, tables: np.ndarray) -> tuple[Tensor, tuple[str, ...]]:
        """Replay a step once for each token of a plan. Returns ids, int64 [steps, n], and the names of all outputs."""
        count, slots = len(plan), self.node.slots
        drawn = torch.empty((plan.steps, count), dtype=torch.int64, device=slots.device)
        given: tuple[str, ...] = ()
        loaded = zip(step.load_each(plan, tables), drawn.unbind(0), strict=True)
        for number, (_, row) in enumerate(loaded):
            outputs = self._replay(step)
            row.copy_(outputs[DRAWN][:count])
            given = tuple(outputs)
            if len(ended := plan.ended_by(number)):
                slots.stop(ended)
        self.counts.hits += plan.steps
        return drawn, given

    def _split(self, plan: DecodePlan, size: int) -> Iterator[DecodePlan]:
        """Yield plans of up to `size` sequences, whose batches stay the same while this one's does."""
        spans = [slice(start, start + size) for start in range(0, len(plan), size)]
        if self._parts[0] is not plan.batch or len(self._parts[1]) != len(spans):
            self._parts = plan.batch, [batch_part(plan.batch, span) for span in spans]
        for batch, span in zip(self._parts[1], spans, strict=True):
            yield plan_part(plan, span, batch)


def batch_part(batch: DecodeBatch, span: slice) -> DecodeBatch:
    """Return some sequences of a decode batch."""
    rows = None if batch.adapters is None else batch.adapters[span]
    adapters = None if rows is None or np.all(rows == NO_ADAPTER) else rows
    mask_rows = None
    if batch.mask_rows is not None and (chosen := batch.mask_rows[span] >= 0).any():
        mask_rows = np.where(chosen, np.cumsum(chosen) - 1, -1).astype(np.int32)
    memory = None if batch.memory is None else batch.memory[:, span]
    return msgspec.structs.replace(
        batch,
        slots=batch.slots[span],
        sampling=batch.sampling[span],
        adapters=adapters,
        mask_rows=mask_rows,
        memory=memory,
    )


def plan_part(plan: DecodePlan, span: slice, batch: DecodeBatch | None = None) -> DecodePlan:
    """Return the plan of some sequences. batch: theirs, if it exists."""
    masks, rows = plan.masks, plan.batch.mask_rows
    if masks is not None and rows is not None:
        masks = masks.rows(rows[span][rows[span] >= 0]) if (rows[span] >= 0).any() else None
    return DecodePlan(
        batch=batch or batch_part(plan.batch, span),
        lengths=plan.lengths[span],
        positions=plan.positions[span],
        drawn=plan.drawn[span],
        items=None if plan.items is None else plan.items[span],
        forced=None if plan.forced is None else plan.forced[span],
        masks=masks,
        steps=plan.steps,
        left=None if plan.left is None else plan.left[span],
    )
