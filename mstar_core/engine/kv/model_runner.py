"""Model runner of a KV node: executes step plans on the device. No policy, no request, no count of the host.

Cost model: a decode step is a fixed number of numpy and torch calls whatever the batch. Python runs per sequence only
for passes and for sequences that fail.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.attention import backend, make_pools
from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.cuda_graphs.decode import plan_part
from mstar_core.engine.cuda_graphs.kinds import signature
from mstar_core.engine.cuda_graphs.node import NodeGraphs
from mstar_core.engine.cuda_graphs.ragged import CapturedNode
from mstar_core.engine.device_state.attached_rows import AttachedRows
from mstar_core.engine.device_state.loop_values import DeviceLoopValues
from mstar_core.engine.device_state.page_store import PageStore
from mstar_core.engine.device_state.slots import DeviceSlots
from mstar_core.engine.failures import node_error
from mstar_core.engine.kv.follower import NodeFollower
from mstar_core.engine.kv.leader import Leader
from mstar_core.engine.kv.packing import packed_draws, packed_masks, packed_ports, packed_positions
from mstar_core.engine.marks import marks_of
from mstar_core.engine.module import node_module
from mstar_core.engine.port_check import require_dict
from mstar_core.engine.ports import fixed_ranks, id_port, position_dtype
from mstar_core.engine.sampling.columns import UploadedColumns
from mstar_core.engine.sampling.masks import MASK_ROWS, MASKS
from mstar_core.engine.sampling.sampler import Sampler
from mstar_core.engine.sampling.scores import log_probabilities, scores
from mstar_core.engine.steps import updates
from mstar_core.engine.steps.adapters import adapter_rows, uploading
from mstar_core.engine.steps.device import DecodeOutput, DrawnIds, PassOutput, StepLimits, StepOutput
from mstar_core.engine.steps.head import head_logits
from mstar_core.engine.steps.packed import metadata_of
from mstar_core.engine.steps.plan import StepPlan
from mstar_core.engine.transfers import upload
from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import GraphCounts
    from mstar_core.engine.cuda_graphs.compilation import Compiling
    from mstar_core.engine.cuda_graphs.decode import DecodeSteps
    from mstar_core.engine.cuda_graphs.passes import Replay
    from mstar_core.engine.group.link import PlanSender
    from mstar_core.engine.kv.packing import Draws, Ports
    from mstar_core.engine.kv.settings import KVSettings
    from mstar_core.engine.marks import Mark
    from mstar_core.engine.steps.attention import AttentionMetadata
    from mstar_core.engine.steps.plan import DecodeBatch, DecodePlan, PassPlan
    from mstar_core.errors import MstarError
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule
    from mstar_core.parallel.collectives import TorchCollectives

log = logging.getLogger(__name__)

Faults = Callable[[Sequence[int]], None]
"""Called with the slots of a forward before it runs; a test makes it raise."""

LOGITS: Final = "logits"
"""Output that every node with a head can give: head(hidden) of the pass's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    """An uncaptured forward, packed and on the device.

    members: indices of its passes in the plan. adapters: of each packed token, None without any.
    """

    decode: DecodePlan | None
    start: int
    passes: Sequence[PassPlan]
    members: Sequence[int]
    metadata: AttentionMetadata
    ports: Ports
    positions: Tensor
    draws: Draws | None
    adapters: np.ndarray | None


@dataclass(slots=True)
class _Results:
    """Outputs of a step so far."""

    passes: list[PassOutput | None]
    decode: list[DecodeOutput] = field(default_factory=list)
    failed: dict[int, MstarError] = field(default_factory=dict)


class ModelRunner:
    """Executes plans of one node; the `Device` of its scheduler. Owned by the KV engine.

    pools: all pools of its pages. graphs: captured steps, None where nothing is captured. leader: publishes plans
    to the followers of a tensor-parallel group.
    """

    def __init__(
        self,
        spec: NodeSpec,
        module: KVModule,
        settings: KVSettings,
        *,
        faults: Faults | None = None,
        report: Callable[[str, str], None] | None = None,
        captures: GraphCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """report: called with the phase and the title of each capture before the first request.

        captures: the cache of captured steps, by default a new one. clock: times steps on a CPU.
        """
        assert spec.kv is not None
        self._spec = spec
        self._module = module
        self._faults = faults
        self._settings = settings
        device, vocab = settings.device, settings.vocab if spec.sampling else 0
        pools = make_pools(spec.kv, settings.num_pages, settings.page_size, settings.dtype, device)
        self._attention = backend(settings.attention, pools, settings.page_size, spec.kv.windows)
        self._attached: AttachedRows | None = None
        if spec.kv.attached:
            self._attached = AttachedRows(spec.kv, settings.num_pages + 1, settings.page_size, settings.dtype, device)
        attached = tuple(self._attached.pools) if self._attached is not None else ()
        self._store = PageStore(pools, attached)
        self.pools = (*pools, *attached)
        self._slots = DeviceSlots(settings.max_slots, vocab, device, position_dtype(spec))
        self._values: DeviceLoopValues | None = None
        if settings.loop is not None:
            self._values = DeviceLoopValues(spec, settings.loop, self._slots, settings.dtype)
        self._id_port = id_port(spec)
        self.sampler = Sampler(spec, self._slots)
        self._row_ports = frozenset(spec.row_ports)
        self._fixed_ranks = fixed_ranks(spec)
        self._uploaded: tuple[DecodeBatch, Tensor, UploadedColumns] | None = None
        self._random: tuple[DecodeBatch, np.ndarray] | None = None
        self._tables = np.zeros((settings.max_slots, -(-settings.max_seq_len // settings.page_size)), dtype=np.int32)
        self.leader: Leader | None = None
        self.is_grouped = False
        self.graphs = self._prepare_graphs(captures, report, marks_of(device, clock))

    def _prepare_graphs(
        self, captures: GraphCache | None, report: Callable[[str, str], None] | None, mark: Callable[[], Mark]
    ) -> NodeGraphs | None:
        """Make the node's captured steps, of which there are none yet."""
        spec, sizes = self._spec, self._settings.graphs
        draws = self._slots.vocab > 0
        if not (sizes.decode or sizes.prefill) or not (spec.hints.capture_sizes or draws):
            return None
        cache = captures or GraphCache(self._settings.device)
        cache.name, cache.report = spec.name, report
        offers = node_module(self._module)
        node = CapturedNode(
            module=self._module,
            attention=self._attention,
            slots=self._slots,
            pages=self._tables.shape[1],
            page_size=self._settings.page_size,
            sampler=self.sampler if draws else None,
            adapters=self._settings.adapters,
            has_memory=spec.kv is not None and spec.kv.memory is not None,
            packed_ports=offers.packed_ports,
            item_parts=offers.item_parts,
        )
        budget = self._settings.token_budget
        return NodeGraphs(spec, node, cache, id_port=self._id_port, token_budget=budget, mark=mark, values=self._values)

    # -- captures ----------------------------------------------------------------------------------------------------

    def trace(self, compiling: Compiling) -> None:
        """Go through the steps that `capture` captures. See NodeRunner."""
        if self.graphs is not None:
            self.graphs.trace(self._settings.graphs, compiling)

    def capture(self) -> None:
        """Capture the steps of the settings. Raises StartError if memory is short for all sizes of a kind."""
        if self.graphs is not None:
            self.graphs.capture(self._settings.graphs)

    def capture_usual(self) -> None:
        """See NodeRunner."""
        if self.graphs is not None:
            self.graphs.capture_usual()

    def queue_captures(self) -> None:
        """Queue the steps that `capture` captures, for `idle`."""
        if self.graphs is not None:
            self.graphs.queue(self._settings.graphs)

    def queue_masking(self) -> None:
        """Queue the masking decode step that holds every batch; `idle` captures it."""
        if self.graphs is not None and self.graphs.decode is not None:
            self.graphs.decode.request_masking()

    def idle(self) -> bool:
        """Capture the next queued bucket. Returns whether more are queued."""
        return self.graphs is not None and self.graphs.idle()

    def compile_later(self) -> None:
        """Run each queued step once, uncaptured. See NodeRunner."""
        if self.graphs is not None:
            self.graphs.warm_up()

    @property
    def graph_counts(self) -> GraphCounts | None:
        """Hits and misses of captured steps; None where nothing is captured."""
        return self.graphs.cache.counts if self.graphs is not None else None

    # -- tensor parallelism ------------------------------------------------------------------------------------------

    def lead(self, sender: PlanSender, collectives: TorchCollectives, size: int) -> None:
        """Publish every plan to the followers of a group of `size` ranks."""
        self.is_grouped = True
        self.leader = Leader(self._spec.name, self._tables.shape, self._slots, sender, collectives, size)
        if self.graphs is not None:
            self.graphs.cache.listener = self.leader

    def follower(self, collectives: TorchCollectives) -> NodeFollower:
        """Return the executor of a leader's plans, which are then the only ones."""
        self.is_grouped = True
        return NodeFollower(self, self.graphs, self._slots, self._tables, collectives)

    # -- the scheduler's calls ---------------------------------------------------------------------------------------

    @property
    def limits(self) -> StepLimits:
        """See Device."""
        return self.graphs.passes.limits if self.graphs is not None else StepLimits()

    def decode_step_s(self, batch: DecodeBatch) -> float:
        """See Device."""
        return self.graphs.decode.step_s(batch) if self.graphs is not None and self.graphs.decode is not None else 0.0

    def launch(self, plan: StepPlan) -> StepOutput:
        """See Device. Raises GroupEnded if a published plan fails."""
        leader = self.leader
        if leader is not None:
            leader.publish(plan)
        with torch.inference_mode(), nullcontext() if leader is None else leader.fail_stop():
            return self._launch(plan)

    def apply(self, changes: Sequence[updates.Update]) -> None:
        """See Device."""
        if not changes:
            return
        if self.leader is not None:
            self.leader.publish(StepPlan(tables=self._tables, updates=tuple(changes)))
        with torch.inference_mode():
            for change in changes:
                self._update(change)

    def loop_value(self, slot: int, port: str) -> Tensor | None:
        """See Device."""
        with torch.inference_mode():
            return self._values.state(slot, port) if self._values is not None else None

    def seen(self, slot: int) -> Tensor | None:
        """See Device."""
        with torch.inference_mode():
            return self._slots.seen[slot].clone() if self._slots.vocab else None

    def counts(self, slot: int) -> Tensor | None:
        """See Device."""
        with torch.inference_mode():
            return self._slots.counts()[slot].clone() if self._slots.vocab else None

    def gather_pages(self, pages: Sequence[int]) -> tuple[Tensor, ...]:
        """See Device."""
        with torch.inference_mode():
            return self._store.gather(pages)

    def attached_rows(self, port: str, pages: Sequence[int], first: int, count: int) -> Tensor:
        """See Device."""
        assert self._attached is not None
        with torch.inference_mode():
            return self._attached.read(port, np.array(pages, dtype=np.int32), first, count)

    def check_pages(self, groups: Sequence[Tensor], pages: int) -> None:
        """See Device."""
        self._store.check(groups, pages)

    # -- one step ----------------------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> StepOutput:
        for change in plan.updates:
            self._update(change)
        results = _Results([None] * len(plan.passes))
        decode, passes = plan.decode, plan.passes
        graphs = self.graphs if self._faults is None else None
        if decode is not None and graphs is not None and graphs.decode is not None:
            decode = self._replay_decode(graphs.decode, plan, decode, results)
        groups = self._groups(passes) if passes else {}
        ids = groups.pop((), [])
        if decode is not None and decode.steps > 1:
            self._decode_each(plan, decode, results)
            decode = None
        if decode is not None and (self._values is not None or not ids):  # its ports differ from those of prompts
            self._isolated(plan, decode, [], results)
            decode = None
        if ids and decode is None:
            ids = self._replay_passes(graphs, plan, ids, results)
        if ids:
            self._isolated(plan, decode, ids, results)
        for members in groups.values():
            rest = self._replay_passes(graphs, plan, members, results)
            if rest:
                self._isolated(plan, None, rest, results)
        if self._attached is not None:
            for planned, output in zip(passes, results.passes, strict=True):
                if planned.keeps and output is not None:
                    self._attached.write(output.ports, plan.tables[planned.slot], planned.cached)
        return StepOutput(decode=results.decode, passes=results.passes, failed=results.failed)

    def _update(self, change: updates.Update) -> None:
        """Change the device state."""
        match change:
            case updates.SlotChanges():
                self._slots.apply(change)
            case updates.SlotCopied():
                self._slots.copy(change.source, change.into)
            case updates.PenaltiesRestored():
                self._slots.restore(change.slot, change.seen, change.counts)
            case updates.LoopValuesSet():
                assert self._values is not None
                self._values.set(change.port, change.slots, change.values)
            case updates.PagesCleared():
                self._attention.clear_pages(change.pages)
            case updates.PagesCopied():
                self._attention.copy_pages(change.copies)
                if self._attached is not None:
                    self._attached.copy(change.copies)
            case updates.PagesSaved():
                self._store.save(change.number, change.pages)
            case updates.PagesRestored():
                self._store.restore(change.number, change.pages)
            case updates.PagesArrived():
                self._store.keep(change.number, change.groups)
            case updates.PagesDropped():
                self._store.drop(change.numbers)

    def _groups(self, passes: Sequence[PassPlan]) -> dict[tuple[object, ...], list[int]]:
        """Return the passes by forward. Those of ids have the key () and share the forward of the decode batch."""
        if len(passes) == 1 and not passes[0].is_ids:
            return {("alone",): [0]}
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, planned in enumerate(passes):
            groups.setdefault(signature(planned, self._spec.batch_key), []).append(index)
        return groups

    # -- captured steps ----------------------------------------------------------------------------------------------

    def _replay_decode(
        self, steps: DecodeSteps, plan: StepPlan, decode: DecodePlan, results: _Results
    ) -> DecodePlan | None:
        """Replay a decode batch. Returns it if it has to run uncaptured."""
        parts, start = steps.replayable(decode), 0
        for part in parts:
            ids, reports, given = steps.run(part, plan.tables)
            count, drawn = ids.shape[-1], DrawnIds.of(ids)
            results.decode.append(DecodeOutput(start=start, count=count, drawn=drawn, reports=reports, given=given))
            start += count
        return None if parts else decode

    def _replay_passes(
        self, graphs: NodeGraphs | None, plan: StepPlan, members: list[int], results: _Results
    ) -> list[int]:
        """Replay the passes that buckets take. Returns the others."""
        if graphs is None:
            return members
        try:
            replays, rest = graphs.passes.run(plan, members)
        except Exception as error:
            if self.is_grouped:
                raise
            # For instance, the outputs of a replay did not fit. Run alone, only passes that cannot run fail.
            log.warning("node %s: passes run uncaptured: %s: %s", self._spec.name, type(error).__name__, error)
            graphs.cache.counts.misses += 1
            return members
        for replay in replays:
            self._report(replay, [plan.passes[index] for index in replay.passes], results)
        return rest

    def _report(self, replay: Replay, passes: Sequence[PassPlan], results: _Results) -> None:
        """Divide the outputs of a replay among its passes."""
        start, count = 0, len(passes)
        for place, (index, planned) in enumerate(zip(replay.passes, passes, strict=True)):
            share = _Share(place, start, planned.count, count, replay.tokens, is_alone=count == 1)
            results.passes[index] = PassOutput(
                ports=self._ports(planned, replay.outputs, share),
                iterations=replay.iterations * planned.iterations,
                later=[self._ports(planned, outputs, share) for outputs in replay.later],
                drawn=replay.drawn if planned.sampling is not None else None,
                index=place,
                given=replay.given,
            )
            start += planned.count

    def _decode_each(self, plan: StepPlan, decode: DecodePlan, results: _Results) -> None:
        """Run the tokens of a plan of several uncaptured, for instance because its bucket has been given up."""
        for number, each in enumerate(decode.each()):
            before = len(results.decode)
            self._isolated(plan, each, [], results)
            results.decode[before:] = [replace(part, first=number) for part in results.decode[before:]]
            if len(ended := decode.ended_by(number)):
                self._slots.stop(ended)

    # -- uncaptured forwards -----------------------------------------------------------------------------------------

    def _isolated(
        self, plan: StepPlan, decode: DecodePlan | None, members: list[int], results: _Results, start: int = 0
    ) -> None:
        """Run one forward. If it fails, run its sequences one by one, so that only the bad ones fail.

        start: place of the first decoding sequence in the decode batch of the step.
        """
        forward = None
        try:
            forward = self._packed(plan, decode, members, start)
            self._run(forward, results)
        except Exception as error:
            if forward is not None and self.is_grouped:
                raise  # the other ranks may have computed it
            count = 0 if decode is None else len(decode)
            if count + len(members) == 1:
                slot = int(decode.batch.slots[0]) if decode is not None else plan.passes[members[0]].slot
                results.failed[slot] = node_error(self._spec.name, error)
                return
            for index in range(count):
                assert decode is not None
                self._isolated(plan, plan_part(decode, slice(index, index + 1)), [], results, start + index)
            for member in members:
                self._isolated(plan, None, [member], results)

    def _packed(self, plan: StepPlan, decode: DecodePlan | None, members: Sequence[int], start: int) -> _Forward:
        """Pack a forward. Raises for sequences that cannot be computed, before anything has changed."""
        passes, device = [plan.passes[index] for index in members], self._slots.device
        if self._faults is not None:
            decoding = [] if decode is None else decode.batch.slots.tolist()
            self._faults([*decoding, *(planned.slot for planned in passes)])
        if self.sampler.subset.are_some and any(LOGITS in planned.wants for planned in passes):
            raise _no_logits(self._spec.name)
        ids = None
        if decode is not None:
            ids = self._slots.last.index_select(0, self._parameters(decode.batch)[0])
        if passes:
            ports = packed_ports(passes, ids, device)
        else:
            assert decode is not None and ids is not None
            ports = self._decode_ports(decode, ids)
        return _Forward(
            decode=decode,
            start=start,
            passes=passes,
            members=members,
            metadata=metadata_of(passes, plan.tables, decode),
            ports=ports,
            positions=packed_positions(decode, passes, device),
            draws=packed_draws(decode, passes),
            adapters=adapter_rows(decode.batch if decode is not None else None, passes),
        )

    def _decode_ports(self, decode: DecodePlan, ids: Tensor) -> Ports:
        values, device = self._values, self._slots.device
        if values is None:
            return {self._id_port: ids}
        if self._random is None or self._random[0] is not decode.batch:
            self._random = decode.batch, values.random_states(decode.batch)
        host = {name: upload(value, device) for name, value in values.values(decode, self._random[1]).items()}
        return {values.ports.id_port: ids, **values.inputs(self._parameters(decode.batch)[0], host)}

    def _parameters(self, batch: DecodeBatch) -> tuple[Tensor, UploadedColumns]:
        """Return a decode batch's slots (int64 [n]) and sampling parameters on the device, uploaded once."""
        if self._uploaded is None or self._uploaded[0] is not batch:
            device = self._slots.device
            columns = UploadedColumns.of(batch.sampling, device)
            self._uploaded = batch, upload(batch.slots, device), columns
        return self._uploaded[1:]

    def _run(self, forward: _Forward, results: _Results) -> None:
        """Run a packed forward, draw, and report. Nothing is reported unless all of it succeeds."""
        decode, passes = forward.decode, forward.passes
        view = self._attention.plan(forward.metadata)
        with uploading(self._settings.adapters, forward.adapters, self._slots.device):
            outputs: dict[str, Tensor] = self._module(kv=view, positions=forward.positions, **forward.ports)
        require_dict(self._spec.name, outputs)
        if any(LOGITS in planned.wants for planned in passes) and LOGITS not in outputs:
            outputs[LOGITS] = head_logits(self._module, outputs).float()
        given = tuple(outputs)
        shares = self._shares(forward, outputs) if passes else []
        drawn = None
        if forward.draws is not None:
            drawn = self._draw(forward, forward.draws, outputs)
        at = 0
        if decode is not None:
            assert drawn is not None
            reports = {port: outputs[port] for port in decode.batch.reports if port in outputs}
            at = len(decode)
            part = DecodeOutput(start=forward.start, count=at, drawn=drawn, reports=reports, given=given)
            results.decode.append(part)
        for member, planned, ports in zip(forward.members, passes, shares, strict=True):
            samples = planned.sampling is not None
            results.passes[member] = PassOutput(
                ports=ports,
                iterations=planned.iterations,
                drawn=drawn if samples else None,
                index=at if samples else -1,
                given=given,
            )
            at += samples

    def _draw(self, forward: _Forward, draws: Draws, outputs: dict[str, Tensor]) -> DrawnIds:
        """Draw ids, or take known ones, and advance the device state of their sequences."""
        slots, decode = self._slots, forward.decode
        ends = None if draws.ends is None else upload(draws.ends, slots.device)
        if decode is not None and not forward.passes:
            places, sampling = self._parameters(decode.batch)
        else:
            places = upload(draws.slots, slots.device)
            sampling = UploadedColumns.of(draws.sampling, slots.device)
        chance = upload(sampling.chance(draws.drawn), slots.device)
        columns = sampling.columns
        logits = head_logits(self._module, outputs, ends)
        logprobs = log_probabilities(logits) if draws.scores else None
        masks, rows = packed_masks(decode, forward.passes)
        if masks is not None and rows is not None:
            columns = {**columns, MASKS: upload(masks, slots.device), MASK_ROWS: upload(rows, slots.device)}
        ids = self.sampler.draw(logits, columns, chance, places)
        if draws.forced is not None:
            forced = upload(draws.forced, ids.device)
            ids = torch.where(forced >= 0, forced, ids)
        scored = None if logprobs is None else scores(logprobs, ids, self.sampler.subset)
        count = 0 if decode is None else len(decode)
        if count and self._values is not None:
            stopped = slots.stopped.index_select(0, places[:count])
            self._values.store(places[:count], forward.ports, outputs, stopped)  # type: ignore[arg-type]
        # With steps launched ahead or at once, a sequence that has stopped in one of them repeats its last id.
        tracked = count if self._settings.lookahead or self._settings.steps_at_once > 1 else 0
        ids = self.sampler.store(sampling.columns, places, ids, tracked, penalises=sampling.penalises)
        return DrawnIds.of(ids, scored)

    # -- outputs -----------------------------------------------------------------------------------------------------

    def _shares(self, forward: _Forward, outputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return each pass's share of the outputs that it wants."""
        start = 0 if forward.decode is None else len(forward.decode)
        total, count = forward.metadata.tokens, len(forward.passes)
        shares = []
        for place, planned in enumerate(forward.passes):
            share = _Share(
                place,
                start,
                planned.count,
                0 if forward.decode is not None else count,
                total,
                is_alone=forward.decode is None and count == 1,
            )
            shares.append(self._ports(planned, outputs, share))
            start += planned.count
        return shares

    def _ports(self, planned: PassPlan, outputs: Mapping[str, Tensor], share: _Share) -> dict[str, Tensor]:
        """Return one pass's share of the packed outputs that it wants."""
        return {port: self._share(port, outputs[port], share) for port in planned.wants if port in outputs}

    def _share(self, port: str, value: Tensor | list[Tensor], share: _Share) -> Tensor:
        """Return one pass's share of a packed output: its tokens, else its batch item, else (alone) the whole."""
        if isinstance(value, list):
            return value[share.place]
        is_by_item = value.dim() > 0 and value.shape[0] == share.items
        if port in self._row_ports:
            if is_by_item:
                return value[share.place]
        elif is_by_item and value.dim() - 1 == self._fixed_ranks.get(port):
            return value[share.place]
        elif value.dim() and value.shape[0] == share.total:
            return value[share.start : share.start + share.count]
        elif share.is_alone:
            return value
        elif is_by_item:
            return value[share.place]
        raise EngineError(
            f"node {self._spec.name} gave {port!r} in a form that cannot be divided among its sequences",
            f"first dimension {list(value.shape)[:1]} is neither {share.total} tokens nor {share.items} sequences",
            node=self._spec.name,
        )


@dataclass(frozen=True, slots=True)
class _Share:
    """Place of a pass in a packed forward: its number, first token and tokens, of so many passes and tokens.

    items: 0 if the forward holds decoding sequences too.
    """

    place: int
    start: int
    count: int
    items: int
    total: int
    is_alone: bool


def _no_logits(node: str) -> EngineError:
    return EngineError(
        f"node {node} has no logits of its whole vocabulary",
        "its head was cut down to the ids that it can draw (Sampling.vocabulary)",
        "start the deployment with the whole vocabulary",
        node=node,
    )
