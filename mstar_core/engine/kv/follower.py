"""Follower's side of tensor parallelism at one KV node: carries out the leader's plans on this rank's share.

It has the node's module, pools, slots and captured steps, and no requests. Used by the worker's follower loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.attention.staging import Staging
from mstar_core.engine.cache.page_table import PageCopy
from mstar_core.engine.cache.slots import SlotChanges
from mstar_core.engine.kv.batch import Draws, PlainForward
from mstar_core.engine.kv.mirror import id_checksum, inlets_of, shared_order
from mstar_core.engine.steps.attention import AttentionMetadata
from mstar_core.engine.transfers import upload
from mstar_core.parallel import plans

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.cache.memory import KVMemory
    from mstar_core.engine.cache.saved_pages import PageStore, SavedPages
    from mstar_core.engine.cuda_graphs.node import NodeGraphs
    from mstar_core.engine.kv.model_runner import ModelRunner
    from mstar_core.parallel.collectives import TorchCollectives
    from mstar_core.parallel.plans import WireArray

_CHANGES: Final = ("moved", "armed", "blank", "met")


class NodeFollower:
    """Carries out plans of one node. Owned by the follower loop."""

    def __init__(
        self,
        runner: ModelRunner,
        memory: KVMemory,
        attention: AttentionBackend,
        store: PageStore,
        collectives: TorchCollectives,
        graphs: NodeGraphs | None,
    ) -> None:
        self._own_graphs = graphs
        self._runner = runner
        self._memory = memory
        self._attention = attention
        self._store = store
        self._collectives = collectives
        self._saved: dict[int, SavedPages] = {}

    @property
    def _graphs(self) -> NodeGraphs:
        assert self._own_graphs is not None, "leader and followers have the same captured steps"
        return self._own_graphs

    def run(self, plan: plans.Plan) -> int | None:
        """Carry out a plan. Returns the checksum that it asks for."""
        with torch.inference_mode():
            return self._run(plan)

    def _run(self, plan: plans.Plan) -> int | None:
        slots = self._memory.slots
        match plan:
            case plans.SlotState():
                self._set_state(plan)
            case plans.SlotsChanged():
                given = {name: getattr(plan, name) for name in _CHANGES}
                slots.apply(SlotChanges(**{name: _array(value) for name, value in given.items()}))
            case plans.SlotCopied():
                slots.copy_on_device(plan.source, plan.into)
            case plans.RowsChanged():
                assert self._memory.rows is not None
                self._memory.rows.set(plan.port, plan.slots.array(), self._received([plan.values])[0])
            case plans.PagesCleared():
                self._attention.clear_pages(plan.pages)
            case plans.PagesCopied():
                self._attention.copy_pages([PageCopy(*pair) for pair in plan.pairs])
            case plans.PagesSaved():
                self._saved[plan.number] = self._store.save(plan.pages)
            case plans.PagesRestored():
                self._store.restore(self._saved[plan.number], plan.pages)
            case plans.PagesDropped():
                for number in plan.numbers:
                    self._saved.pop(number, None)
            case plans.Forward():
                self._runner.follow(self._forward(plan))
            case plans.Capture():
                self._graphs.buckets_of(plan.kind).add(plan.size)
            case plans.Replay():
                self._replay(plan)
            case plans.Compare():
                return int(id_checksum(slots.device_last).item())
            case plans.StopPlans():
                pass  # of the whole group
        return None

    def _replay(self, plan: plans.Replay) -> None:
        step = self._graphs.buckets_of(plan.kind)[plan.size]
        inlets, tables = inlets_of(step), self._memory.tables.ids
        for load in plan.loads:
            values = {name: wire.array() for name, wire in load.values.items()}
            inlet = inlets[load.buffer]
            if isinstance(inlet, Staging):
                inlet.put(values)
                continue
            assert load.attention is not None
            inlet.prepare(_metadata(load.attention, tables), values)
        for late in plan.late:
            target = step.parts[late.part].late_port(late.port)[: late.value.shape[0]]
            if late.value.data is None:
                self._collectives.broadcast(target)
            else:
                target.copy_(late.value.tensor(target.device))
        step.run()

    def _set_state(self, plan: plans.SlotState) -> None:
        tables, slots = self._memory.tables, self._memory.slots
        for slot, data in plan.tables.items():
            pages = np.frombuffer(data, dtype=tables.ids.dtype)
            tables.ids[slot, : len(pages)] = pages
            tables.ids[slot, len(pages) :] = pages[0] if len(pages) else 0
        for slot, sampling in plan.draws.items():
            slots.sampling[slot] = sampling

    def _forward(self, plan: plans.Forward) -> PlainForward:
        slots = self._memory.slots
        device = slots.device
        positions = plan.positions.tensor(device)
        ports: dict[str, Tensor | list[Tensor]] = {name: wire.tensor(device) for name, wire in plan.ports.items()}
        ports |= {name: [wire.tensor(device) for wire in each] for name, each in plan.lists.items()}
        wires = [plan.positions]
        for name in sorted(ports):
            wires += [plan.ports[name]] if name in plan.ports else plan.lists[name]
        self._receive(wires, shared_order(positions, ports))
        draws = None
        if plan.draws is not None:
            drawn = plan.draws.slots.array()
            slots.drawn[drawn] = plan.draws.counters.array()
            draws = Draws(slots=drawn, tracked=plan.draws.tracked, ends=_array(plan.draws.ends))
        attention = _metadata(plan.attention, self._memory.tables.ids)
        return PlainForward(
            attention=attention,
            ports=ports,
            positions=positions,
            draws=draws,
            wants_logits=plan.wants_logits,
            stores_rows=plan.stores_rows,
            decode_slots=upload(attention.page_rows[: plan.decodes], device) if plan.decodes else None,
        )

    def _received(self, wires: list[plans.WireTensor]) -> list[Tensor]:
        found = [wire.tensor(self._memory.slots.device) for wire in wires]
        self._receive(wires, found)
        return found

    def _receive(self, wires: list[plans.WireTensor], values: list[Tensor]) -> None:
        """Receive the broadcasts of values that did not travel in the plan."""
        for wire, value in zip(wires, values, strict=True):
            if wire.data is None:
                self._collectives.broadcast(value)


def _metadata(wire: plans.WireAttention, tables: np.ndarray) -> AttentionMetadata:
    rows, lengths = wire.page_rows.array(), wire.lengths.array()
    if wire.query_starts is None or wire.causal is None or wire.writes is None:
        return AttentionMetadata.of(rows, lengths, tables)
    return AttentionMetadata(
        query_starts=wire.query_starts.array(),
        page_rows=rows,
        lengths=lengths,
        causal=wire.causal.array(),
        writes=wire.writes.array(),
        tables=tables,
    )


def _array(wire: WireArray | None) -> np.ndarray | None:
    return None if wire is None else wire.array()
