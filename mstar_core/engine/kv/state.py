"""What the KV engine knows at any moment: requests, branches with work, decode rows, steps in flight.

Shared by the engine and its admission, which both change it; nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mstar_core.engine.base import Failed, StepResult
from mstar_core.engine.batching import Holder
from mstar_core.engine.failures import node_error
from mstar_core.engine.kv.sequence import Branch, KVRequest
from mstar_core.engine.transfers import contiguous_runs
from mstar_core.errors import EngineError, MstarError, TooLarge

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Handle, Job
    from mstar_core.engine.cache.page_pool import OutOfPages, PagePool
    from mstar_core.engine.cache.page_table import PageTables
    from mstar_core.engine.cache.prefix_cache import PrefixCache
    from mstar_core.engine.cache.slots import Slots
    from mstar_core.engine.kv.batch import BatchOutput, DecodeBatch


class PendingCopy(Protocol):
    """A value on its way to the host; `HostCopy` is one. pending: where it arrives."""

    @property
    def pending(self) -> Tensor: ...

    @property
    def is_done(self) -> bool: ...

    def wait(self) -> Tensor: ...


@dataclass(slots=True)
class KVStep:
    """A step in flight. dropped: keys whose decode rows in it no longer count. fixed: branches that wait for it.

    arriving: what ended loops gave for the host. A step that gives nothing to the host is done when it is launched.
    """

    batches: list[BatchOutput]
    result: StepResult
    started: float
    dropped: set[int] = field(default_factory=set)
    fixed: list[Branch] = field(default_factory=list)
    arriving: list[PendingCopy] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether all that the host reads of this step is there."""
        ids = (out.host_ids for out in self.batches if out.host_ids is not None)
        return all(each.is_done for each in ids) and all(each.is_done for each in self.arriving)

    def bring(self, ports: frozenset[str], told: frozenset[str], to_host: Callable[[Tensor], PendingCopy]) -> None:
        """Send what loops gave on these ports to the host, behind the step and before all that is launched later.

        What rows of one pass gave travels together.
        ports: of loops that ended and of iterations that are told; told: of the latter alone.
        """
        wanted = [(item.outputs, ports) for item in self.result.done]
        wanted += [(item.outputs, ports | told) for item in self.result.emissions]
        for port in sorted(ports | told):
            givers = [outputs for outputs, names in wanted if port in names and port in outputs]
            for span, values in contiguous_runs([outputs[port] for outputs in givers]):
                self.arriving.append(to_host(values))
                for outputs, value in zip(givers[span], self.arriving[-1].pending, strict=True):
                    outputs[port] = value


@dataclass(slots=True)
class KVState:
    """Everything of one node that changes from step to step. Owned by its KV engine.

    pending: branches with work outside the decode rows, by (age, branch). looping: job key -> branch of a resident
    loop; active: those of them that run in the next step. decode: arrays of the active rows, remade when
    `is_decode_current` is false. ready: results that no step brought. lacks_slots, lacks_pages: the last look at who
    may enter found somebody who waits for them. has_changed: something has changed since, so that they may go on.
    """

    name: str
    pool: PagePool
    tables: PageTables
    cache: PrefixCache | None
    slots: Slots
    clock: Callable[[], float]
    requests: dict[Handle, KVRequest] = field(default_factory=dict)
    pending: dict[tuple[int, str], Branch] = field(default_factory=dict)
    looping: dict[int, Branch] = field(default_factory=dict)
    active: dict[int, Branch] = field(default_factory=dict)
    decode: DecodeBatch | None = None
    is_decode_current: bool = True
    in_flight: list[KVStep] = field(default_factory=list)
    ready: StepResult = field(default_factory=StepResult)
    preempted: int = 0
    preempted_pages: int = 0
    last_preempted: Handle | None = None
    lacks_slots: bool = False
    lacks_pages: bool = False
    has_changed: bool = True
    decode_since: float = float("inf")

    @property
    def is_blocked(self) -> bool:
        """Whether somebody waits for room, who goes before all that come after."""
        return self.lacks_slots or self.lacks_pages

    def look(self) -> None:
        """Forget who waited: a new look at all who have work begins."""
        self.lacks_slots = self.lacks_pages = self.has_changed = False

    def waits(self, branch: Branch) -> bool:
        """Whether a branch with work cannot run now. Who found no room is looked at again after every change."""
        return branch.in_flight > 0 or (not self.has_changed and self.lacked(branch) != "")

    def lacked(self, branch: Branch) -> str:
        """What the last look found a branch with work to wait for: `slots`, `pages`, or nothing."""
        if branch.is_reserved:
            return ""
        if self.lacks_slots and branch.lacks_slots:
            return "slots"
        return "pages" if self.lacks_pages else ""

    def holders(self) -> Iterator[Holder]:
        """Requests that have slots, with the pages they hold."""
        for request in self.requests.values():
            if request.slots:
                pages = int(self.tables.count[request.slots].sum())
                fixed = any(branch.in_flight for branch in request.sequences())
                yield Holder(order=request.order, pages=pages, is_fixed=fixed)

    def is_alone(self, request: KVRequest) -> bool:
        """Whether no other request holds a page."""
        return all(holder.order == request.order or not holder.pages for holder in self.holders())

    def held(self) -> dict[Handle, tuple[int, str]]:
        """See HoldsPages."""
        counts, waits = self.tables.count.tolist(), dict[int, str]()
        for branch in self.pending.values() if self.is_blocked else ():
            if not branch.in_flight and (lacked := self.lacked(branch)):
                waits[branch.request.order] = f"waits for {lacked}"
        return {
            handle: (sum(counts[slot] for slot in request.slots), waits.get(request.order, ""))
            for handle, request in self.requests.items()
        }

    def oldest_with_work(self) -> int | None:
        """Age of the oldest request that has anything to do and slots to do it with; None without any.

        One that waits for slots does not count: those who hold them have to go on, and may need its pages for that.
        """
        # Requests stand in the order in which they were opened, so that the first found is the oldest.
        able = (r.order for r in self.requests.values()
                if any(b.has_work and not b.lacks_slots for b in r.branches.values()))  # fmt: skip
        return next(able, None)

    def fail(self, result: StepResult, branch: Branch, job: Job, error: MstarError) -> None:
        """Fail a request: report the job, take its other work away, keep its slots until it is closed."""
        request = branch.request
        if request.is_failed:
            return
        whole = branch.trunk.job if branch.trunk is not None else None
        result.failed.append(Failed(job=whole or job, error=error))
        request.is_failed = True
        for each in request.sequences():
            self.pending.pop((request.order, each.name), None)
            self.stop_decoding(each)
            each.queue.clear()
            each.replay.clear()
            each.job = each.forward = each.loop = None
            if each.rows is not None:
                each.rows.job = None
            if each.slot >= 0:
                self.tables.release(each.slot)
        self.has_changed = True

    def stop_decoding(self, branch: Branch) -> None:
        """Take a branch out of the decode rows; what steps in flight draw for it no longer counts."""
        if not branch.is_decoding or branch.job is None:
            return
        key = int(branch.job.key)
        branch.is_decoding = False
        self.looping.pop(key, None)
        if self.active.pop(key, None) is not None:
            self.is_decode_current = False
        for running in self.in_flight:
            running.dropped.add(key)

    def hold(self, branch: Branch, outputs: Mapping[str, Tensor]) -> None:
        """Remember what the ports of a branch last held; a row's values are remembered with those of its neighbours."""
        if branch.trunk is None:
            branch.request.held.update(outputs)

    def look_again(self, branch: Branch) -> None:
        """Queue a branch whose job has ended if more jobs wait there."""
        key = (branch.request.order, branch.name)
        if branch.queue:
            self.pending[key] = branch
            branch.waiting_since = self.clock()
        else:
            self.pending.pop(key, None)

    def wrapped(self, error: Exception) -> MstarError:
        """Any exception as one of ours, naming the node."""
        return node_error(self.name, error)

    def no_id(self) -> EngineError:
        """The error of a row whose logits have no finite maximum."""
        return EngineError(f"node {self.name} gave no finite logits for this request", node=self.name)

    def outgrown(self, shortage: OutOfPages) -> TooLarge:
        """The error of a request that nothing can make room for."""
        return TooLarge(
            f"the request outgrew the cache of node {self.name}",
            shortage.detail,
            "lower the output limit or give the deployment more cache",
            node=self.name,
        )
