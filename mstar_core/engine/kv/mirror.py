"""Leader's side of tensor parallelism at one KV node: publishes what its runner does to the device's state.

Scheduling, page tables and requests stay with the leader. Followers get page tables and sampling parameters as they
change, and each forward or captured step before the leader launches it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.cuda_graphs.decode import DECODE
from mstar_core.engine.cuda_graphs.prefill import PREFILL
from mstar_core.engine.transfers import HostCopy
from mstar_core.parallel import plans
from mstar_core.parallel.plans import Checksum, Late, Load, WireArray, WireAttention, WireTensor, wire_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.staging import Staging, Values
    from mstar_core.engine.base import SamplingParams
    from mstar_core.engine.cache.memory import KVMemory
    from mstar_core.engine.cache.page_table import PageCopy
    from mstar_core.engine.cache.saved_pages import SavedPages
    from mstar_core.engine.cache.slots import SlotChanges
    from mstar_core.engine.cuda_graphs.cache import Size, StaticStep
    from mstar_core.engine.kv.batch import PlainForward
    from mstar_core.engine.steps.attention import AttentionMetadata
    from mstar_core.parallel.collectives import TorchCollectives
    from mstar_core.parallel.link import GroupEnded, PlanSender

COMPARE_EVERY: Final = 64
"""Launches between two checksums of the drawn ids."""

_NONE: Final = np.zeros(0, dtype=np.int64)
_FACTOR: Final = 2_654_435_761
_MODULUS: Final = 1_000_003


class LeaderMirror:
    """Publishes the plans of one node. Owned by its KV engine; used from the worker's thread."""

    def __init__(
        self, node: str, memory: KVMemory, sender: PlanSender, collectives: TorchCollectives, size: int
    ) -> None:
        self._node = node
        self._memory = memory
        self._sender = sender
        self._collectives = collectives
        self._followers = size - 1
        tables = memory.tables
        self._sent = np.full_like(tables.ids, -1)
        self._sent_count = np.zeros_like(tables.count)
        self._draws: dict[int, SamplingParams] = {}
        self._dropped: list[int] = []
        self._launches = 0
        self._own: dict[int, HostCopy] = {}
        self._answers: dict[int, int] = {}
        memory.slots.on_changes = self._slots_changed
        memory.slots.on_copy = self._slot_copied
        if memory.rows is not None:
            memory.rows.on_change = self._rows_changed

    # -- state -------------------------------------------------------------------------------------------------------

    def _slots_changed(self, changes: SlotChanges) -> None:
        given = {name: getattr(changes, name) for name in ("moved", "armed", "blank", "met")}
        arrays = {name: WireArray.of(value) for name, value in given.items() if value is not None}
        self._sender.add(plans.SlotsChanged(node=self._node, **arrays))

    def _slot_copied(self, source: int, into: int) -> None:
        self._sender.add(plans.SlotCopied(node=self._node, source=source, into=into))

    def _rows_changed(self, port: str, slots: np.ndarray, values: Tensor) -> None:
        wire = WireTensor.of(values)
        self._sender.publish(plans.RowsChanged(node=self._node, port=port, slots=WireArray.of(slots), values=wire))
        self._share([values])

    def pages_cleared(self, pages: Sequence[int]) -> None:
        """Publish pages that are cleared."""
        self._sender.add(plans.PagesCleared(node=self._node, pages=list(pages)))

    def pages_copied(self, copies: Sequence[PageCopy]) -> None:
        """Publish page copies."""
        self._sender.add(plans.PagesCopied(node=self._node, pairs=[(copy.source, copy.target) for copy in copies]))

    def pages_saved(self, saved: SavedPages, pages: Sequence[int]) -> None:
        """Publish a copy of pages to the host. Followers free theirs when nothing refers to the leader's."""
        self._sender.add(plans.PagesSaved(node=self._node, number=saved.number, pages=list(pages)))
        weakref.finalize(saved, self._dropped.append, saved.number)

    def pages_restored(self, saved: SavedPages, pages: Sequence[int]) -> None:
        """Publish that saved pages are written back."""
        self._sender.add(plans.PagesRestored(node=self._node, number=saved.number, pages=list(pages)))

    # -- launches ----------------------------------------------------------------------------------------------------

    def forward(self, step: PlainForward) -> None:
        """Publish an uncaptured forward, and share its device inputs."""
        draws = step.draws
        drawn = draws.slots if draws is not None else np.zeros(0, dtype=np.int64)
        self._state(step.attention.page_rows, drawn)
        self._compare(draws=draws is not None)
        ports, lists = wire_tensors(step.ports)
        wire = None
        if draws is not None:
            counters = WireArray.of(self._memory.slots.drawn[draws.slots])
            ends = None if draws.ends is None else WireArray.of(draws.ends)
            wire = plans.WireDraws(WireArray.of(draws.slots), counters, ends, draws.tracked)
        self._sender.publish(
            plans.Forward(
                node=self._node,
                attention=_wire_attention(step.attention),
                decodes=0 if step.decode_slots is None else len(step.decode_slots),
                positions=WireTensor.of(step.positions),
                ports=ports,
                lists=lists,
                wants_logits=step.wants_logits,
                stores_rows=step.stores_rows,
                draws=wire,
            )
        )
        self._share(shared_order(step.positions, step.ports))

    @contextmanager
    def fail_stop(self) -> Iterator[None]:
        """End the group if the block fails: its plan is published, so followers have run it."""
        try:
            yield
        except Exception as error:
            raise self.failed(error) from error

    def failed(self, error: Exception) -> GroupEnded:
        """Return the end of the group by an error after a plan was published."""
        return self._sender.failed(f"node {self._node}: {type(error).__name__}: {error}")

    # -- captured steps ----------------------------------------------------------------------------------------------

    def captures(self, kind: bytes, size: Size) -> None:
        """See StepMirror."""
        self._sender.publish(plans.Capture(node=self._node, kind=kind, size=size))

    def attach(self, kind: bytes, size: Size, step: StaticStep[Any]) -> None:
        """See StepMirror."""
        loads: list[Load] = []
        late: list[tuple[Late, Tensor]] = []

        def filled(part: int, port: str, target: Tensor) -> None:
            late.append((Late(part, port, WireTensor.of(target)), target))

        for number, inlet in enumerate(inlets_of(step)):
            if isinstance(inlet, AttentionBuffers):
                inlet.on_prepare = partial(self._prepared, loads, number)
            else:
                inlet.on_put = partial(self._put, loads, number)
        for number, part in enumerate(step.parts):
            part.on_late = partial(filled, number)
        step.before_run = partial(self._replay, kind, size, loads, late)

    def _put(self, loads: list[Load], number: int, values: Values) -> None:
        loads.append(Load(number, _wire_values(values)))

    def _prepared(self, loads: list[Load], number: int, metadata: AttentionMetadata, values: Values) -> None:
        loads.append(Load(number, _wire_values(values), _wire_attention(metadata)))

    def _replay(self, kind: bytes, size: Size, loads: list[Load], late: list[tuple[Late, Tensor]]) -> None:
        rows = [load.attention.page_rows.array() for load in loads if load.attention is not None]
        self._state(np.concatenate(rows) if rows else _NONE, _NONE)
        self._compare(draws=kind.startswith((DECODE, PREFILL)))
        plan = plans.Replay(node=self._node, kind=kind, size=size, loads=loads[:], late=[each for each, _ in late])
        self._sender.publish(plan)
        self._share([target for _, target in late])
        loads.clear()
        late.clear()

    def _state(self, rows: np.ndarray, drawn: np.ndarray) -> None:
        """Publish page tables of these slots, and sampling parameters of those that draw, where they changed."""
        if self._dropped:
            numbers = self._dropped[:]
            del self._dropped[: len(numbers)]
            self._sender.add(plans.PagesDropped(node=self._node, numbers=numbers))
        tables, slots = self._memory.tables, self._memory.slots
        rows = np.unique(rows)
        width = int(tables.count[rows].max()) if len(rows) else 0
        changed = (tables.ids[rows, :width] != self._sent[rows, :width]).any(axis=1)
        changed |= tables.count[rows] != self._sent_count[rows]
        found = rows[changed]
        self._sent[found] = tables.ids[found]
        self._sent_count[found] = tables.count[found]
        pages = {int(slot): tables.ids[slot, : tables.count[slot]].tobytes() for slot in found}
        sampling = {slot: slots.sampling[slot] for slot in drawn.tolist()}
        draws = {slot: params for slot, params in sampling.items() if self._draws.get(slot) is not params}
        self._draws |= draws
        if pages or draws:
            self._sender.add(plans.SlotState(node=self._node, tables=pages, draws=draws))

    def _share(self, values: Sequence[Tensor]) -> None:
        """Broadcast values that are on a device; those on the host travel in the plan."""
        for value in values:
            if not value.is_cpu:
                self._collectives.broadcast(value.contiguous())

    # -- checks ------------------------------------------------------------------------------------------------------

    def _compare(self, *, draws: bool) -> None:
        """Request a checksum every COMPARE_EVERY launches that draw, and check the answers that have arrived."""
        if not draws:
            return
        self._launches += 1
        if self._launches % COMPARE_EVERY:
            return
        number = self._launches // COMPARE_EVERY
        self._own[number] = HostCopy(id_checksum(self._memory.slots.device_last))
        self._sender.add(plans.Compare(node=self._node, number=number))
        for answer in self._sender.answers(self._node):
            self._check(answer)

    def _check(self, answer: Checksum) -> None:
        """Compare a follower's checksum with the leader's. Raises GroupEnded if they differ."""
        value = int(self._own[answer.number].wait().item())
        if value != answer.value:
            raise self._sender.failed(
                f"node {self._node}: a rank drew other ids than the leader "
                f"(member {answer.index}, checksum {answer.value}, the leader's {value})"
            )
        self._answers[answer.number] = self._answers.get(answer.number, 0) + 1
        if self._answers[answer.number] == self._followers:
            del self._own[answer.number], self._answers[answer.number]


def inlets_of(step: StaticStep[Any]) -> list[Staging | AttentionBuffers]:
    """Return all buffers of a step that the host fills, in the order of their numbers."""
    return [inlet for part in step.parts for inlet in part.inlets]


def _wire_values(values: Values) -> dict[str, WireArray]:
    return {name: WireArray.of(value) for name, value in values.items()}


def _wire_attention(metadata: AttentionMetadata) -> WireAttention:
    rows, lengths = WireArray.of(metadata.page_rows), WireArray.of(metadata.lengths)
    if metadata.leading_decodes == len(metadata.page_rows):
        return WireAttention(rows, lengths)
    masks = WireArray.of(metadata.causal), WireArray.of(metadata.writes)
    return WireAttention(rows, lengths, WireArray.of(metadata.query_starts), *masks)


def id_checksum(last: Tensor) -> Tensor:
    """Return a checksum of the last ids of all slots but the spare one: int64, 0-d. last: int64 [slots + 1]."""
    places = torch.arange(1, last.shape[0], dtype=torch.int64, device=last.device)
    return ((last[:-1] + 1) * (places * _FACTOR % _MODULUS)).sum()


def shared_order(positions: Tensor, ports: dict[str, Tensor | list[Tensor]]) -> list[Tensor]:
    """Return the tensors of a forward in the order of their broadcasts."""
    found = [positions]
    for name in sorted(ports):
        value = ports[name]
        found += value if isinstance(value, list) else [value]
    return found
