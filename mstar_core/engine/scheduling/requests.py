"""Requests of a KV node and their branches with work: what waits, what decodes, what is in flight.

The state that the scheduler and its parts share; holds no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mstar_core.engine.base import NO_ADAPTER, Contention, Failed, StepResult
from mstar_core.engine.failures import node_error
from mstar_core.engine.scheduling.step import Decoding
from mstar_core.engine.steps.plan import DecodeBatch
from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Handle, Job
    from mstar_core.engine.cache.memory import KVMemory
    from mstar_core.engine.scheduling.sequence import Branch, KVRequest
    from mstar_core.engine.scheduling.step import KVStep


@dataclass(slots=True)
class Requests:
    """Requests in order of age, and their branches with work. Owned by the scheduler.

    pending: branches with work outside the decode batch, by `Branch.key`. looping: job key -> branch of a resident
    loop; active: those in the next decode batch, which is rebuilt when `is_decode_current` is false; starving: those
    that wait for the next item of their stream.
    decoding: the decode batch; partial: the same without constrained loops, made while `is_partial_current` is false.
    ready: results that come with the next step. waits_for_slots, waits_for_pages: the last scheduling pass found a
    branch that waits for them; has_changed: something has changed since, so that it may run.
    """

    node: str
    memory: KVMemory
    clock: Callable[[], float]
    requests: dict[Handle, KVRequest] = field(default_factory=dict)
    pending: dict[tuple[int, str], Branch] = field(default_factory=dict)
    looping: dict[int, Branch] = field(default_factory=dict)
    active: dict[int, Branch] = field(default_factory=dict)
    starving: dict[int, Branch] = field(default_factory=dict)
    decoding: Decoding | None = None
    partial: Decoding | None = None
    is_decode_current: bool = True
    is_partial_current: bool = True
    decode_version: int = 0
    decode_since: float = float("inf")
    in_flight: list[KVStep] = field(default_factory=list)
    ready: StepResult = field(default_factory=StepResult)
    waits_for_slots: bool = False
    waits_for_pages: bool = False
    has_changed: bool = True

    # -- what waits --------------------------------------------------------------------------------------------------

    def add(self, branch: Branch) -> None:
        """Queue a branch that has work."""
        self.pending[branch.key] = branch
        branch.waiting_since = self.clock()

    def remove(self, branch: Branch) -> None:
        """Take a branch out of the queue."""
        self.pending.pop(branch.key, None)

    def requeue(self, branch: Branch) -> None:
        """Queue a branch whose job has ended if it has more jobs, else take it out."""
        if branch.queue:
            self.add(branch)
        else:
            self.remove(branch)

    def begin_pass(self) -> None:
        """Begin a scheduling pass: forget what waited."""
        self.waits_for_slots = self.waits_for_pages = self.has_changed = False

    @property
    def is_blocked(self) -> bool:
        """Whether a branch waits for memory; it goes before all that are younger."""
        return self.waits_for_slots or self.waits_for_pages

    def is_waiting(self, branch: Branch) -> bool:
        """Return whether a branch with work cannot run now. After a change, every branch may be able to."""
        if branch.in_flight > 0 or branch.request.is_compiling:
            return True
        return not self.has_changed and self.missing(branch) != ""

    def missing(self, branch: Branch) -> str:
        """Return what the last scheduling pass found missing for a branch with work: `slots`, `pages` or nothing."""
        if branch.is_reserved:
            return ""
        if self.waits_for_slots and branch.needs_slots:
            return "slots"
        return "pages" if self.waits_for_pages else ""

    def oldest_with_work(self) -> int | None:
        """Return the age of the oldest request that has work and slots, or None.

        A request that waits for slots or for its stream does not count: others must go on, and may need its pages.
        """
        return next((r.order for r in self.requests.values() if any(map(self._can_go_on, r.branches.values()))), None)

    def page_holders(self) -> Iterator[tuple[KVRequest, int]]:
        """Yield requests that hold pages, with their number."""
        for request in self.requests.values():
            if request.slots and (pages := self.memory.pages_of(request.slots)):
                yield request, pages

    def contention(self) -> Contention:
        """See NodeRunner."""
        goes_on = {branch.request.order for branch in (*self.active.values(), *self.starving.values())}
        goes_on |= {branch.request.order for branch in self.pending.values() if branch.in_flight}
        goes_on |= {request.order for request in self.requests.values() if request.is_compiling}
        waiting = {branch.request.order for branch in self.pending.values()} - goes_on
        return Contention(
            holding={handle for handle, request in self.requests.items() if request.slots},
            waiting={handle for handle, request in self.requests.items() if request.order in waiting},
        )

    def pages_and_waits(self) -> dict[Handle, tuple[int, str]]:
        """See NodeRunner."""
        counts, waits = self.memory.tables.count.tolist(), dict[int, str]()
        for branch in self.starving.values():
            if branch.job is not None and branch.job.loop is not None:
                waits[branch.request.order] = f"waits for input {branch.job.loop.feed}"
        for branch in self.pending.values():
            if branch.request.is_compiling:
                waits[branch.request.order] = "waits for its grammar"
            elif self.is_blocked and not branch.in_flight and (missing := self.missing(branch)):
                waits[branch.request.order] = f"waits for {missing}"
        return {
            handle: (sum(counts[slot] for slot in request.slots), waits.get(request.order, ""))
            for handle, request in self.requests.items()
        }

    # -- the decode batch --------------------------------------------------------------------------------------------

    def join_decode(self, branch: Branch) -> None:
        """Move a branch from the queue to the decode batch, or let it wait there for its stream."""
        assert branch.job is not None
        self.remove(branch)
        key = int(branch.job.key)
        if self._is_dry(branch):
            self.starving[key] = branch
            return
        if not self.active:
            self.decode_since = self.clock()
        self.active[key] = branch
        self.is_decode_current = False

    def await_pages(self, branch: Branch) -> None:
        """Queue a preempted branch of the decode batch; first it waits for its stream, if it has to."""
        assert branch.job is not None
        if self._is_dry(branch):
            self.starving[int(branch.job.key)] = branch
        else:
            self.add(branch)

    def wake(self, branch: Branch) -> None:
        """Let a branch go on whose next item has come."""
        assert branch.job is not None
        del self.starving[int(branch.job.key)]
        if branch.is_reserved and branch.loop_state.known is None:
            self.join_decode(branch)
        else:
            self.add(branch)
            self.has_changed = True

    def _is_dry(self, branch: Branch) -> bool:
        """Return whether a branch in a resident loop has no item for its next iteration."""
        return self.memory.feeds is not None and self.memory.feeds.is_dry(branch.slot)

    def is_starving(self, branch: Branch) -> bool:
        """Return whether a branch in a resident loop waits for the next item of its stream."""
        return bool(self.starving) and branch.job is not None and int(branch.job.key) in self.starving

    def _can_go_on(self, branch: Branch) -> bool:
        return branch.has_work and not branch.needs_slots and not self.is_starving(branch)

    def is_in_flight(self, key: int) -> bool:
        """Return whether a step in flight computes an iteration of a resident loop."""
        return any(step.decodes(key) for step in self.in_flight)

    def leave_decode(self, key: int) -> bool:
        """Take a loop out of the next decode batch. Returns whether it was in it."""
        self.starving.pop(key, None)
        if self.active.pop(key, None) is None:
            return False
        self.is_decode_current = False
        return True

    def stop_decoding(self, branch: Branch) -> None:
        """End a resident loop; ids that steps in flight draw for it no longer count."""
        if not branch.is_decoding or branch.job is None:
            return
        key = int(branch.job.key)
        branch.is_decoding = False
        self.looping.pop(key, None)
        self.leave_decode(key)
        if self.memory.feeds is not None:
            self.memory.feeds.end(key)
        for step in self.in_flight:
            step.dropped.add(key)

    def current_decode(self) -> Decoding | None:
        """Return the decode batch of the next step, rebuilt if its members changed.

        Constrained loops take no part while `undecided` says so. The others go on without them. Batches with and
        without such loops alternate, so both are kept until the members change.
        """
        if not self.is_decode_current:
            sequences = sorted(self.active.values(), key=lambda branch: branch.request.order)
            self.decoding = self._new_decode(sequences) if sequences else None
            self.is_decode_current, self.is_partial_current = True, False
        if self.decoding is None or not self.undecided:
            return self.decoding
        if not self.is_partial_current:
            sequences = [branch for branch in self.decoding.sequences if branch.matcher is None]
            self.partial = self._new_decode(sequences) if sequences else None
            self.is_partial_current = True
        return self.partial

    @property
    def undecided(self) -> frozenset[int]:
        """Keys of the constrained loops in the decode batch: all of them while an id of one is in flight, else none.

        The next mask of that one depends on the id. The others wait for it, so that they stay in one batch: those that
        began a step apart would otherwise go on by turns, and each half of them costs the device a whole step.
        """
        if not any(not step.undecided.isdisjoint(self.active) for step in self.in_flight):
            return frozenset()
        return frozenset(key for key, branch in self.active.items() if branch.matcher is not None)

    def _new_decode(self, sequences: list[Branch]) -> Decoding:
        self.decode_version += 1
        slots = np.array([branch.slot for branch in sequences], dtype=np.int64)
        loops = [branch.job.loop for branch in sequences if branch.job is not None and branch.job.loop is not None]
        sampling = tuple(self.memory.slots.sampling[slot] for slot in slots)
        adapters = np.array([branch.request.adapter for branch in sequences], dtype=np.int64)
        batch = DecodeBatch(
            version=self.decode_version,
            slots=slots,
            sampling=sampling,
            adjusts=any(each.adjusts for each in sampling),
            scores=any(each.logprobs is not None for each in sampling),
            mask_rows=_mask_rows(sequences),
            reports=frozenset[str]().union(*(loop.emit for loop in loops)),
            to_host=frozenset[str]().union(*(loop.host_emit for loop in loops)),
            adapters=adapters if np.any(adapters != NO_ADAPTER) else None,
            memory=self._memories(sequences),
        )
        keys = self.memory.slots.key[slots]
        constrained = [key for key, branch in zip(keys.tolist(), sequences, strict=True) if branch.matcher is not None]
        return Decoding(sequences, keys, batch, frozenset(constrained), any([loop.is_read for loop in loops]))

    def _memories(self, sequences: Sequence[Branch]) -> np.ndarray | None:
        """Return slot and tokens of the memory of each sequence, see DecodeBatch."""
        memories = [memory.slot for branch in sequences if (memory := branch.request.memory_of(branch)) is not None]
        return np.array([memories, self.memory.tables.length[memories]], dtype=np.int64) if memories else None

    # -- results -----------------------------------------------------------------------------------------------------

    def remember(self, branch: Branch, outputs: Mapping[str, Tensor]) -> None:
        """Keep the last values of a branch's ports; those of candidates are kept by their group."""
        if branch.parent is None:
            branch.request.last_values.update(outputs)

    def fail(self, branch: Branch, job: Job, error: Exception, result: StepResult | None = None) -> None:
        """Fail a request: report the job, drop its other work, free its pages. Its slots stay until it is closed.

        result: of the step that found the error, by default that of the next one.
        """
        request = branch.request
        if request.is_failed:
            return
        whole = branch.parent.job if branch.parent is not None else None
        failed = Failed(job=whole or job, error=node_error(self.node, error))
        (result or self.ready).failed.append(failed)
        request.is_failed = True
        self.stop(request)

    def stop(self, request: KVRequest) -> None:
        """Drop all work of a request, and free its pages."""
        for branch in request.sequences():
            self.remove(branch)
            self.stop_decoding(branch)
            branch.clear()
            if branch.candidates is not None:
                branch.candidates.job = None
            if branch.slot >= 0:
                self.memory.tables.release(branch.slot)
        self.has_changed = True


def _mask_rows(sequences: Sequence[Branch]) -> np.ndarray | None:
    """Return the place of each sequence among the constrained ones, see DecodeBatch."""
    has_mask = np.array([branch.matcher is not None for branch in sequences])
    if not has_mask.any():
        return None
    rows: np.ndarray = np.where(has_mask, np.cumsum(has_mask) - 1, -1).astype(np.int32)
    return rows


def no_id(node: str) -> EngineError:
    """Return the error of a request for which a node drew no id."""
    return EngineError(f"node {node} gave no finite logits for this request", node=node)
