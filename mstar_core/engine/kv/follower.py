"""Follower's side of tensor parallelism at one KV node: executes the leader's plans on this rank's share.

It has a runner and no scheduler. Used by the worker's follower loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from mstar_core.engine.group import plans
from mstar_core.engine.kv.leader import id_checksum
from mstar_core.engine.kv.recent_batches import RecentBatches

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import StepBuckets
    from mstar_core.engine.cuda_graphs.node import NodeGraphs
    from mstar_core.engine.device_state.slots import DeviceSlots
    from mstar_core.engine.steps.device import Device
    from mstar_core.parallel.collectives import TorchCollectives


class NodeFollower:
    """Executes the plans of one node. Owned by the follower loop.

    tables: its page tables, int32 [slots, max_pages], which the leader's plans fill.
    """

    def __init__(
        self,
        runner: Device,
        graphs: NodeGraphs | None,
        slots: DeviceSlots,
        tables: np.ndarray,
        collectives: TorchCollectives,
    ) -> None:
        self._runner = runner
        self._graphs = graphs
        self._slots = slots
        self._tables = tables
        self._collectives = collectives
        self._batches = RecentBatches()

    def run(self, plan: plans.Plan, shared: Sequence[Tensor] = ()) -> int | None:
        """Execute a plan. Returns the checksum that it asks for. shared: device tensors that the leader broadcasts."""
        with torch.inference_mode():
            match plan:
                case plans.Step():
                    for value in shared:
                        self._collectives.broadcast(value)
                    self._launch(plan)
                case plans.Capture():
                    self._buckets(plan).add(plan.size)
                case plans.Dropped():
                    self._buckets(plan).drop(plan.size)
                case plans.Compare():
                    return int(id_checksum(self._slots.last).item())
                case plans.StopPlans():
                    pass  # of the whole group
        return None

    def _launch(self, step: plans.Step) -> None:
        for slot, pages in step.tables.items():
            self._tables[slot] = np.frombuffer(pages, dtype=self._tables.dtype)
        decode = step.plan.decode
        if decode is not None:
            batch = self._batches.known(decode.batch.version)
            if batch is None:
                batch = decode.batch
                self._batches.add(batch)
            decode = msgspec.structs.replace(decode, batch=batch)
        self._runner.launch(msgspec.structs.replace(step.plan, tables=self._tables, decode=decode))

    def _buckets(self, plan: plans.Capture | plans.Dropped) -> StepBuckets[object]:  # type: ignore[type-var]
        assert self._graphs is not None, "leader and followers have the same captured steps"
        return self._graphs.buckets_of(plan.kind)
