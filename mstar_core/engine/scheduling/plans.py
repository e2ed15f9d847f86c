"""Plans of a KV node's steps: records of what runs, and the host's counts advanced past it. Part of the scheduler.

Cost model: a decode step is a fixed number of numpy calls whatever the batch. Python runs per pass, and for sequences
that end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from mstar_core.engine.scheduling.step import Launch, ScheduledPass
from mstar_core.engine.steps.limits import AHEAD, AHEAD_TOKENS
from mstar_core.engine.steps.plan import DecodePlan, LoopPlan, PassPlan, StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mstar_core.engine.scheduling.pages import Pages
    from mstar_core.engine.scheduling.requests import Requests
    from mstar_core.engine.scheduling.sequence import Branch
    from mstar_core.engine.scheduling.step import Decoding
    from mstar_core.engine.steps.device import Device
    from mstar_core.graph.declare.nodes import NodeSpec

_NONE: Final = np.zeros(0, dtype=np.int64)


class Plans:
    """Makes the plans of one node. It keeps no state."""

    def __init__(self, spec: NodeSpec, requests: Requests, pages: Pages, device: Device) -> None:
        self._samples = spec.sampling is not None
        self._requests = requests
        self._memory = requests.memory
        self._pages = pages
        self._device = device

    def scheduled(self, branch: Branch, count: int) -> ScheduledPass:
        """Return the next `count` tokens of a branch's current pass."""
        forward, job = branch.current, branch.job
        assert forward is not None
        is_last = count == forward.left
        samples = is_last and self._samples and not forward.is_replay and job is not None and job.sample
        return ScheduledPass(branch, forward, job, count, is_last, samples)

    def launch(self, decoding: Decoding | None, passes: list[ScheduledPass]) -> Launch:
        """Return the plan of these sequences. The host's counts then are those after the step."""
        if passes:
            self._look_ahead(passes)
        plans = tuple([self._pass_plan(one) for one in passes])
        decode, place, left = None, _NONE, _NONE
        if decoding is not None:
            decode, place, left = self._decode(decoding)
        for one in passes:
            one.forward.done += one.count
            if one.forward.attend.write:
                self._memory.tables.length[one.branch.slot] += one.count
            if one.samples:
                self._memory.slots.drawn[one.branch.slot] += 1
        plan = StepPlan(
            tables=self._memory.tables.ids, updates=self._memory.take_updates(), decode=decode, passes=plans
        )
        return Launch(plan, decoding, place, left, passes)

    # -- decode ------------------------------------------------------------------------------------------------------

    def _decode(self, decoding: Decoding) -> tuple[DecodePlan, np.ndarray, np.ndarray]:
        """Plan a token of each decoding sequence. Those without another iteration leave the next decode batch.

        Returns the plan, the cache index of the id that each draws, and its iterations left: int64 [n].
        """
        slots, state, tables, feeds = decoding.batch.slots, self._memory.slots, self._memory.tables, self._memory.feeds
        lengths, drawn, left = tables.length[slots], state.drawn[slots], state.left[slots] - 1
        plan = DecodePlan(
            batch=decoding.batch,
            lengths=lengths,
            positions=state.positions(slots),
            drawn=drawn,
            items=feeds.values(slots) if feeds is not None else None,
        )
        place = lengths + 1
        tables.length[slots], state.drawn[slots], state.left[slots] = place, drawn + 1, left
        state.next_position[slots] += 1
        if np.count_nonzero(left) < len(left):
            for index in np.nonzero(left == 0)[0].tolist():
                self._requests.leave_decode(int(decoding.keys[index]))
        if feeds is not None:
            feeds.take(slots)
            for index in np.nonzero(feeds.dry(slots) & (left > 0))[0].tolist():
                key = int(decoding.keys[index])
                if self._requests.leave_decode(key):
                    self._requests.starving[key] = decoding.sequences[index]
        return plan, place, left

    # -- passes ------------------------------------------------------------------------------------------------------

    def _pass_plan(self, one: ScheduledPass) -> PassPlan:
        forward, branch, count = one.forward, one.branch, one.count
        slots, slot = self._memory.slots, branch.slot
        ports, positions, position, is_whole = forward.ports, forward.given, forward.position, count == forward.tokens
        if not is_whole:
            ports = {
                name: value if (axis := forward.axes[name]) is None else value.narrow(axis, forward.done, count)
                for name, value in ports.items()
            }
            if positions is not None:
                positions = positions.narrow(-1, forward.done, count)
            elif forward.attend.positions == "running":
                position += forward.done
        return PassPlan(
            slot=slot,
            cached=int(self._memory.tables.length[slot]),
            count=count,
            ports=ports,
            axes=forward.axes,
            attend=forward.attend,
            position=position,
            given=positions,
            is_whole=is_whole,
            is_ids=forward.is_ids,
            is_replay=forward.is_replay,
            per_item=forward.per_item,
            iterations=forward.iterations,
            wants=frozenset() if forward.is_replay else branch.wants,
            sampling=slots.sampling[slot] if one.samples else None,
            drawn=int(slots.drawn[slot]),
            loop=_loop_plan(one),
        )

    def _look_ahead(self, passes: Sequence[ScheduledPass]) -> None:
        """Let one replay compute several loop iterations where nothing could join in between, if pages are free.

        A loop that reports each iteration runs ahead from its second one on, unless another branch waits or cannot run
        ahead: a request that has just arrived joins the next step.
        """
        tokens = sum(one.count for one in passes)
        sizes = [size for size in AHEAD if size * tokens <= AHEAD_TOKENS]
        if not sizes or not self._device.limits.captures_passes:
            return
        most = [_most_ahead(one) for one in passes]
        is_crowded = bool(self._requests.active) or len(self._requests.pending) > len(passes) or min(most) == 1
        for one, limit in zip(passes, most, strict=True):
            if not (is_crowded and one.branch.emits):
                fits = (size for size in sizes if size <= limit)
                slot, count = one.branch.slot, one.count
                one.ahead = next((size for size in fits if self._pages.reserve_ahead(slot, count * size)), 1)


def _most_ahead(one: ScheduledPass) -> int:
    """Return the iterations, from this pass's on, that nothing can interrupt."""
    loop, state, forward = one.job.loop if one.job is not None else None, one.branch.loop, one.forward
    if loop is None or state is None or not loop.fused or not loop.carry or loop.stop_port is not None:
        return 1
    if forward.is_replay or not forward.attend.write or (loop.emit and not state.iteration):
        return 1
    return min([state.limit, *map(len, state.lists.values())]) - state.iteration


def _loop_plan(one: ScheduledPass) -> LoopPlan | None:
    loop, state = one.job.loop if one.job is not None else None, one.branch.loop
    if loop is None or state is None:
        return None
    return LoopPlan(
        is_fused=loop.fused,
        emits=bool(loop.emit),
        ends_early=loop.stop_port is not None,
        carry=loop.carry,
        iteration=state.iteration,
        limit=state.limit,
        lists=state.lists,
        ahead=one.ahead,
    )
