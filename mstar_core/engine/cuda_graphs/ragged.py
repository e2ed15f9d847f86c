"""Captured ragged step: passes of several sequences, packed, in one replay.

Ids or vectors, appended or beside the cache, with or without a draw: these are properties of its `StepKind`. Small host
values travel with the attention metadata in one copy; large ones are written behind it. A step of several iterations
runs a loop whole, or some of its iterations ahead of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import torch

from mstar_core.engine.attention.staging import Staging, host_array, port_field
from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.cuda_graphs.cache import StaticStep
from mstar_core.engine.cuda_graphs.kinds import MOST_ITERATIONS, POSITIONS, STEP_PORT, PortForm, StepKind
from mstar_core.engine.sampling.columns import columns, states
from mstar_core.engine.sampling.columns import fields as column_fields
from mstar_core.engine.sampling.masks import MASK_ROWS, MASKS, padded_rows
from mstar_core.engine.sampling.masks import fields as mask_fields
from mstar_core.engine.steps.adapters import adapter_fields, adapter_rows, adapter_values, applying
from mstar_core.engine.steps.attention import AttentionShape
from mstar_core.engine.steps.head import head_logits
from mstar_core.engine.steps.packed import host_positions, metadata_of
from mstar_core.engine.transfers import gather, join, upload
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers import rng
from mstar_core.layers.kv_view import AppendOnlyView

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.device_state.slots import DeviceSlots
    from mstar_core.engine.sampling.sampler import Sampler
    from mstar_core.engine.steps.plan import PassPlan
    from mstar_core.layers.kv_view import KVModule
    from mstar_core.layers.lora import AdapterBank

DRAWN: Final = "$drawn"
"""Key of the drawn ids among the outputs of a captured step; the other keys are the module's ports."""

GREEDY: Final = SamplingParams()
"""Sampling of passes that draw nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedNode:
    """Parts of one node that all its captured steps share.

    pages: most pages of a sequence, of page_size tokens each. sampler: None without sampling. adapters: None in a
    deployment without LoRA adapters; otherwise every step has their kernels. has_memory: decode steps read memories.
    packed_ports, item_parts: of the module, see NodeModule.
    """

    module: KVModule
    attention: AttentionBackend
    slots: DeviceSlots
    pages: int
    page_size: int
    sampler: Sampler | None = None
    adapters: AdapterBank | None = None
    has_memory: bool = False
    packed_ports: Collection[str] = ()
    item_parts: Callable[[str, Tensor], Sequence[Tensor]] | None = None

    @property
    def draws(self) -> Sampler:
        """Its sampler, which must be there."""
        assert self.sampler is not None
        return self.sampler

    @property
    def no_tables(self) -> np.ndarray:
        """Page tables of no sequences."""
        return np.zeros((1, self.pages), dtype=np.int32)

    @property
    def device(self) -> torch.device:
        """Device of the node."""
        return self.slots.device


@dataclass(frozen=True, slots=True)
class BucketSize:
    """Most packed tokens, batch items and pages of a sequence that one bucket takes."""

    tokens: int
    items: int
    pages: int


class RaggedStep(StaticStep[list[dict[str, "Tensor"]]]):
    """Passes of one kind in one bucket. Padding touches the spare slot and the spare page only.

    later: buffers of the iterations after the first, if several append. outputs: those of each iteration that appends,
    else of the last.
    """

    def __init__(self, node: CapturedNode, kind: StepKind, size: BucketSize, shared: dict[str, Tensor]) -> None:
        """shared: inputs of at least this size, which other buckets of the kind use too."""
        self._node = node
        self.kind = kind
        self.size = size
        inputs = {form: form.count(size.tokens, size.items) for form in kind.inputs}
        fields = {
            port_field(form.name): (form.dtype, int(np.prod(form.size(count), dtype=np.int64)))
            for form, count in inputs.items()
            if form.is_staged
        }
        fields |= adapter_fields(node.adapters, size.tokens)
        if kind.samples:
            if kind.adjusts:
                node.slots.counts()  # a capture must not allocate them
            fields |= {"ends": (torch.int64, size.items), "chance": (torch.float64, size.items)}
            fields |= {"slots": (torch.int64, size.items), **column_fields(size.items, adjusting=kind.adjusts)}
        self._masks: Staging | None = None
        if kind.masks:
            fields[MASK_ROWS] = (torch.int32, size.items)
            self._masks = Staging(mask_fields(size.items, node.slots.vocab), node.device)
        self.buffers = AttentionBuffers(node.attention.static(_shape(kind, size)), node.device, fields)
        values = self.buffers.device
        self._inputs = {
            form.name: values[port_field(form.name)].view(form.size(count))
            if form.is_staged
            else form.part(shared[form.name], count)
            if form.name in shared
            else torch.zeros(form.size(count), dtype=form.dtype, device=node.device)
            for form, count in inputs.items()
        }
        single = replace(kind, iterations=1)
        ahead = range(1, kind.iterations) if kind.runs_ahead else ()
        self.later: tuple[RaggedStep, ...] = tuple(RaggedStep(node, single, size, {}) for _ in ahead)
        self.load([], node.no_tables)

    # -- before a replay ---------------------------------------------------------------------------------------------

    def load(self, passes: Sequence[PassPlan], tables: np.ndarray, ahead: int = 0) -> int:
        """Fill the buffers for these passes, small values in one copy. Returns the batch items in use.

        tables: see StepPlan. ahead: iterations between the passes and this step; carried ports are then left to the
        step before.
        """
        kind = self.kind
        if ahead:
            passes = [later_pass(planned, ahead) for planned in passes]
        staged = dict[str, np.ndarray]()
        late: list[PortForm] = []
        for form in kind.inputs if passes else ():
            if ahead and form.name in kind.carried:
                continue
            if form.name == POSITIONS and form.is_staged:
                staged[port_field(POSITIONS)] = host_positions(passes)
                continue
            values = [_input(planned, form) for planned in passes]
            if not form.is_staged or not all([value.is_cpu for value in values]):
                late.append(form)
            else:
                joined = values[0] if len(values) == 1 else torch.cat(values)
                staged[port_field(form.name)] = host_array(joined)
        metadata = metadata_of(passes, tables)
        if kind.samples:
            staged |= self._draws(passes, metadata.query_starts)
        if self._node.adapters is not None and passes:
            staged |= adapter_values(adapter_rows(None, passes))
        self.buffers.prepare(metadata, staged)
        for form in late:  # after the copy, which clears the other fields
            self._write(form, passes, metadata.tokens, len(metadata.page_rows))
        return len(metadata.page_rows)

    def _write(self, form: PortForm, passes: Sequence[PassPlan], tokens: int, items: int) -> None:
        """Copy an input from where it is, without the host."""
        target = form.part(self._inputs[form.name], form.count(tokens, items))
        if form.axis is None and len(passes) > 1:
            values = [upload(value, target.device) for planned in passes for value in planned.items(form.name)]
            gather(values, target)
        elif form.axis:
            values = [upload(_input(planned, form), target.device) for planned in passes]
            target.copy_(values[0] if len(values) == 1 else torch.cat(values, dim=form.axis))
        elif form.is_packed:
            parts = self._node.item_parts
            assert parts is not None
            join([part for planned in passes for part in parts(form.name, planned.ports[form.name])], target)
        else:
            join([_input(planned, form) for planned in passes], target)

    def _draws(self, passes: Sequence[PassPlan], starts: np.ndarray) -> dict[str, np.ndarray]:
        """Return the sampling fields. Passes that draw nothing draw into the spare slot."""
        spare = self._node.slots.spare
        slots = np.full(self.size.items, spare, dtype=np.int64)
        slots[: len(passes)] = [spare if planned.sampling is None else planned.slot for planned in passes]
        params = [planned.sampling or GREEDY for planned in passes]
        drawn = np.array([planned.drawn for planned in passes], dtype=np.int64)
        values = columns(params, self.size.items, adjusting=self.kind.adjusts)
        if self._masks is not None:
            masks = [planned.mask for planned in passes if planned.mask is not None]
            assert len(masks) == len(passes), "all passes of a masking step have masks"
            values |= padded_rows(np.arange(len(masks), dtype=np.int32), self.size.items)
            if masks:
                self._masks.put({MASKS: np.concatenate(masks)})
        return {**values, "slots": slots, "ends": starts[1:] - 1, "chance": rng.uniform_host(states(params), drawn)}

    # -- the captured part -------------------------------------------------------------------------------------------

    def forward(self) -> list[dict[str, Tensor]]:
        """Run all iterations. Returns the packed outputs of each that appends, else of the last; ids under DRAWN."""
        return self._iterate(MOST_ITERATIONS)

    def warm_up(self) -> None:
        """Run two iterations: the second reads what the first gave, as all later ones do."""
        self._iterate(2)

    def _iterate(self, most: int) -> list[dict[str, Tensor]]:
        steps = (self, *self.later)
        carried = dict[str, "Tensor"]()
        outputs: list[dict[str, Tensor]] = []
        for step in steps:
            step.buffers.reset()
        for iteration in range(min(most, self.kind.iterations)):
            step = steps[iteration] if self.later else self
            inputs = {**step._inputs, **carried}
            if STEP_PORT in inputs and iteration and not self.later:
                inputs[STEP_PORT] = inputs[STEP_PORT] + iteration
            view = AppendOnlyView(step.buffers.view) if self.kind.is_append_only else step.buffers.view
            with applying(self._node.adapters, step.buffers.device):
                outputs.append(self._node.module(kv=view, **inputs))
            carried = {into: outputs[-1][port].to(self._inputs[into].dtype) for port, into in self.kind.carry}
        for step in steps:
            step.buffers.reset()
        if self.kind.samples:
            outputs[-1] = {**outputs[-1], DRAWN: self._drawn(outputs[-1])}
        return outputs if self.later else outputs[-1:]

    def _drawn(self, outputs: dict[str, Tensor]) -> Tensor:
        """Draw an id after each pass, and note it in the slots: int64 [items]."""
        values, sampler = self.buffers.device, self._node.draws
        logits = head_logits(self._node.module, outputs, values["ends"])
        columns = values
        if self._masks is not None:
            columns = {**values, MASKS: self._masks.device[MASKS].view(self.size.items, -1)}
        ids = sampler.draw(logits, columns, values["chance"], values["slots"])
        return sampler.store(values, values["slots"], ids)


def later_pass(planned: PassPlan, ahead: int) -> PassPlan:
    """Return the pass of a loop so many iterations later, without its carried inputs."""
    loop = planned.loop
    assert loop is not None
    at = loop.iteration + ahead
    ports = planned.ports | {name: value[at : at + 1] for name, value in loop.lists.items()}
    if STEP_PORT in ports:
        ports[STEP_PORT] = ports[STEP_PORT] + ahead
    position = planned.position + ahead * (planned.next_position - planned.position)
    cached = planned.cached + ahead * planned.count
    return msgspec.structs.replace(planned, ports=ports, position=position, cached=cached)


def _shape(kind: StepKind, size: BucketSize) -> AttentionShape:
    """Return the static shape of a bucket's attention."""
    is_ragged = not kind.item_tokens or kind.causal
    return AttentionShape(
        sequences=size.items,
        tokens=size.tokens if is_ragged else kind.item_tokens,
        pages=size.pages,
        writes=kind.writes,
        causal=kind.causal,
        is_ragged=is_ragged,
        is_fresh=kind.is_fresh,
    )


def _input(planned: PassPlan, form: PortForm) -> Tensor:
    """Return a pass's values of an input with tokens or batch items on its axis."""
    if form.name == POSITIONS:
        assert planned.given is not None
        return planned.given
    value = planned.ports[form.name]
    return value[None] if form.axis is None and planned.iterations == 1 else value
