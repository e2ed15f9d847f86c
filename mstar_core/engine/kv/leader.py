"""Leader's side of tensor parallelism at one KV node: publishes each step plan before its runner executes it.

Scheduling and requests stay with the leader. Followers execute the same plans with runners of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import torch

from mstar_core.engine.group import plans
from mstar_core.engine.kv.recent_batches import RecentBatches
from mstar_core.engine.steps.plan import DecodeBatch
from mstar_core.engine.transfers import HostCopy

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import Size
    from mstar_core.engine.cuda_graphs.kinds import StepKind
    from mstar_core.engine.device_state.slots import DeviceSlots
    from mstar_core.engine.group.link import GroupEnded, PlanSender
    from mstar_core.engine.group.plans import Checksum
    from mstar_core.engine.steps.plan import StepPlan
    from mstar_core.parallel.collectives import TorchCollectives

COMPARE_EVERY: Final = 64
"""Steps that draw between two checksums of the drawn ids."""

_NONE: Final = np.zeros(0, dtype=np.int64)
_FACTOR: Final = 2_654_435_761
_MODULUS: Final = 1_000_003


class Leader:
    """Publishes the plans of one node. Owned by its runner; used from the worker's thread."""

    def __init__(
        self,
        node: str,
        tables: tuple[int, ...],
        slots: DeviceSlots,
        sender: PlanSender,
        collectives: TorchCollectives,
        size: int,
    ) -> None:
        """tables: shape of the page tables. size: ranks of the group."""
        self._node = node
        self._slots = slots
        self._sender = sender
        self._collectives = collectives
        self._followers = size - 1
        self._sent = np.full(tables, -1, dtype=np.int32)
        self._batches = RecentBatches()
        self._draws = 0
        self._checksums: dict[int, HostCopy] = {}
        self._answers: dict[int, int] = {}

    def publish(self, plan: StepPlan) -> None:
        """Send a plan to the followers, and broadcast its device tensors."""
        if plan.decode is not None or any(planned.sampling is not None for planned in plan.passes):
            self._compare()
        tables, decode = self._changed_tables(plan), plan.decode
        if decode is not None and self._batches.known(decode.batch.version) is not None:
            version = DecodeBatch(version=decode.batch.version, slots=_NONE, sampling=())
            decode = msgspec.structs.replace(decode, batch=version)
        elif decode is not None:
            self._batches.add(decode.batch)
        bare = msgspec.structs.replace(plan, tables=_NONE, decode=decode)
        for value in self._sender.publish(plans.Step(node=self._node, plan=bare, tables=tables)):
            self._collectives.broadcast(value.contiguous())

    @contextmanager
    def fail_stop(self) -> Iterator[None]:
        """End the group if the block fails: its plan is published, so followers have executed it."""
        try:
            yield
        except Exception as error:
            raise self.failed(error) from error

    def failed(self, error: Exception) -> GroupEnded:
        """Return the end of the group by an error after a plan was published."""
        return self._sender.failed(f"node {self._node}: {type(error).__name__}: {error}")

    def captures(self, kind: StepKind, size: Size) -> None:
        """See CaptureListener."""
        self._sender.publish(plans.Capture(node=self._node, kind=kind, size=size))

    def drops(self, kind: StepKind, size: Size) -> None:
        """See CaptureListener."""
        self._sender.publish(plans.Dropped(node=self._node, kind=kind, size=size))

    def _changed_tables(self, plan: StepPlan) -> dict[int, bytes]:
        """Return the rows of the page tables that the followers do not have yet."""
        slots = np.array(sorted({planned.slot for planned in plan.passes}), dtype=np.int64)
        if plan.decode is not None:
            slots = np.concatenate([plan.decode.batch.slots, slots])
        changed = slots[(plan.tables[slots] != self._sent[slots]).any(axis=1)]
        self._sent[changed] = plan.tables[changed]
        return {int(slot): plan.tables[slot].tobytes() for slot in changed}

    # -- checks ------------------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Request a checksum every COMPARE_EVERY steps that draw, and check the answers that have arrived."""
        self._draws += 1
        if self._draws % COMPARE_EVERY:
            return
        number = self._draws // COMPARE_EVERY
        with torch.inference_mode():
            self._checksums[number] = HostCopy(id_checksum(self._slots.last))
        self._sender.add(plans.Compare(node=self._node, number=number))
        for answer in self._sender.answers(self._node):
            self._check(answer)

    def _check(self, answer: Checksum) -> None:
        """Compare a follower's checksum with the leader's. Raises GroupEnded if they differ."""
        value = int(self._checksums[answer.number].wait().item())
        if value != answer.value:
            raise self._sender.failed(
                f"node {self._node}: a rank drew other ids than the leader "
                f"(member {answer.index}, checksum {answer.value}, the leader's {value})"
            )
        self._answers[answer.number] = self._answers.get(answer.number, 0) + 1
        if self._answers[answer.number] == self._followers:
            del self._checksums[answer.number], self._answers[answer.number]


def id_checksum(last: Tensor) -> Tensor:
    """Return a checksum of the last ids of all slots but the spare one: int64, 0-d. last: int64 [slots + 1]."""
    places = torch.arange(1, last.shape[0], dtype=torch.int64, device=last.device)
    return ((last[:-1] + 1) * (places * _FACTOR % _MODULUS)).sum()
