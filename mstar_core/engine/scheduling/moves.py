"""Caches that leave for another rank or come from one: the jobs with `Job.move`. Part of the scheduler.

A cache that came is like one that was preempted with its pages saved: it gets pages like any other, under pressure too,
and then its pages are written. Later preemptions copy its pages to the host, because its log stays behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mstar_core.engine.base import CacheState, Done
from mstar_core.engine.cache.prefix_cache import ContentChain
from mstar_core.engine.scheduling.sequence import Branch, Logged
from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from mstar_core.engine.base import Export, Job
    from mstar_core.engine.scheduling.requests import Requests
    from mstar_core.engine.steps.device import Device


class Moves:
    """Exports and imports of one node. It keeps no state."""

    def __init__(self, requests: Requests, device: Device) -> None:
        self._node = requests.node
        self._requests = requests
        self._memory = requests.memory
        self._device = device

    def start(self, branch: Branch, job: Job) -> None:
        """Prepare a move. Raises EngineError for a cache that does not fit, or whose candidates would be lost."""
        group = branch.candidates
        if group is not None and not (group.takes_turns or group.is_for_loop):
            raise EngineError(
                f"a cache of node {self._node} cannot move to another rank while its candidates live",
                f"branch {branch.name!r} has {len(group.branches)}",
                "place the walks that share candidates on one rank",
                node=self._node,
            )
        if isinstance(job.move, CacheState):
            self._import(branch, job.move)

    def is_ready(self, branch: Branch) -> bool:
        """Return whether a branch has all its pages, so that its move can end."""
        return not branch.is_evicted and not branch.replay and branch.saved is None

    def finish(self, branch: Branch, job: Job) -> None:
        """End a move, and report it."""
        assert job.move is not None
        cache = None if isinstance(job.move, CacheState) else self._export(branch, job.move)
        self._requests.ready.done.append(Done(job=job, cache=cache))
        branch.job = None
        self._requests.requeue(branch)
        self._requests.has_changed = True

    def _export(self, branch: Branch, export: Export) -> CacheState:
        """Take the cache of a branch, which is empty afterwards."""
        slot, memory = branch.slot, self._memory
        slots, length = memory.slots, int(memory.tables.length[slot])
        pages = memory.pages(slot, length)
        sampling = slots.sampling[slot]
        taken = [] if branch.matcher is None else branch.matcher.ids
        self._device.apply(memory.take_updates())
        state = CacheState(
            length=length,
            position=slots.position(slot),
            last=int(slots.last[slot]),
            drawn=int(slots.drawn[slot]),
            history=torch.from_numpy(slots.history[slot, :length].copy()),
            seen=self._device.seen(slot) if sampling.repetition_penalty != 1 else None,
            counts=self._device.counts(slot) if sampling.adjusts else None,
            answer=torch.tensor(taken, dtype=torch.int32) if taken else None,
            pages=self._device.gather_pages(pages) if pages else (),
            last_values={p: v for p, v in branch.request.last_values.items() if p in export.carried},
        )
        self._empty(branch)
        return state

    def _import(self, branch: Branch, state: CacheState) -> None:
        """Give a branch the state of a cache that came; its pages follow when it gets some of its own."""
        memory, slots, slot = self._memory, self._memory.slots, branch.slot
        saved = None
        if state.length:
            self._device.check_pages(state.pages, memory.pool.pages_for(state.length))
            saved = memory.arrived_pages(state.pages)
        self._empty(branch)
        slots.next_position[slot], slots.drawn[slot] = state.position, state.drawn
        slots.history[slot, : state.length] = state.history.numpy()
        slots.set_last(slot, state.last)
        memory.restore_penalties(slot, state.seen, state.counts)
        branch.chain.is_open = False  # its page keys stay behind
        if branch.request.grammar is not None:
            branch.matcher = branch.request.grammar.matcher()
            branch.matcher.take([] if state.answer is None else state.answer.tolist())
        branch.request.last_values.update(state.last_values)
        if state.length:
            branch.record(Logged(tokens=state.length, position=0))
            branch.saved, branch.is_evicted, branch.saves_pages = saved, True, True

    def _empty(self, branch: Branch) -> None:
        """Drop the cache of a branch; its job goes on."""
        self._memory.tables.release(branch.slot)
        self._memory.slots.next_position[branch.slot] = 0
        branch.log, branch.logged, branch.rollback = [], 0, None
        branch.chain = ContentChain(self._memory.pool.page_size)
        branch.replay.clear()
        branch.forward = branch.loop = branch.saved = None
        branch.is_evicted = branch.is_reserved = branch.saves_pages = False
