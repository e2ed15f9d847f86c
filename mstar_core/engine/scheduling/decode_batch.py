"""Decode batch of a KV node: pages and plan of its next step, then the ids that a step drew. Part of the scheduler.

Cost model: a step is a fixed number of numpy calls whatever the batch. Python runs for sequences that end, need a page,
or report values beside their ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mstar_core.engine.base import Done, Emission, LoopStep
from mstar_core.engine.ports import fixed_ranks
from mstar_core.engine.scheduling.requests import no_id
from mstar_core.engine.steps.masks import Masks
from mstar_core.engine.steps.plan import DecodePlan
from mstar_core.engine.steps.updates import NO_ID
from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.constraints.matcher import Grammars
    from mstar_core.engine.base import StepResult
    from mstar_core.engine.port_check import PortCheck
    from mstar_core.engine.scheduling.loops import Loops
    from mstar_core.engine.scheduling.pages import Pages
    from mstar_core.engine.scheduling.requests import Requests
    from mstar_core.engine.scheduling.sequence import Branch
    from mstar_core.engine.scheduling.step import Decoding, KVStep, Launch
    from mstar_core.engine.steps.device import DecodeOutput
    from mstar_core.graph.declare.nodes import NodeSpec


class DecodeScheduler:
    """Advances the sequences in resident loops by one token per step. It keeps no state."""

    def __init__(
        self,
        spec: NodeSpec,
        requests: Requests,
        loops: Loops,
        pages: Pages,
        check: PortCheck,
        grammars: Grammars | None = None,
    ) -> None:
        self._fixed_ranks = fixed_ranks(spec)
        self._requests = requests
        self._memory = requests.memory
        self._loops = loops
        self._pages = pages
        self._check = check
        self._grammars = grammars

    # -- before a launch ---------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Give each decoding sequence a page for its next token. Pressure preempts the youngest request."""
        tables, decoding = self._memory.tables, self._requests.current_decode()
        if decoding is None:
            return
        slots = decoding.batch.slots
        full = tables.length[slots] >= tables.capacity[slots]
        if np.count_nonzero(full):
            for index in np.nonzero(full)[0].tolist():
                self._pages.grow(decoding.sequences[index])

    def steps_at_once(self, decoding: Decoding, most: int) -> int:
        """Return how many tokens of each sequence one launch may compute, and get their pages without preempting.

        Several where the device knows all inputs of the next token: those of the sampled id and carried values. What a
        step draws from masks, reports beside its ids or takes from a stream passes through the host.
        """
        batch, pool, tables = decoding.batch, self._memory.pool, self._memory.tables
        if batch.scores or batch.mask_rows is not None or batch.reports or self._memory.feeds is not None:
            return 1
        most = min(most, int(self._memory.slots.left[batch.slots].max()))
        if most < 2 or pool.available < len(batch.slots):  # pages ahead must not cause a preemption
            return 1
        short = tables.length[batch.slots] + most > tables.capacity[batch.slots]
        is_there = all([self._pages.reserve_ahead(slot, most) for slot in batch.slots[short].tolist()])
        return most if is_there else 1

    def plan(self, decoding: Decoding, steps: int = 1) -> tuple[DecodePlan, np.ndarray, np.ndarray]:
        """Plan tokens of each decoding sequence. Those without another iteration leave the next decode batch.

        Returns the plan, the cache index of the first id that each draws, and its iterations left after it: int64 [n].
        """
        slots, state, tables, feeds = decoding.batch.slots, self._memory.slots, self._memory.tables, self._memory.feeds
        lengths, drawn, left = tables.length[slots], state.drawn[slots], state.left[slots] - 1
        forced = self._forced(decoding, left) if decoding.batch.scores else None
        plan = DecodePlan(
            batch=decoding.batch,
            lengths=lengths,
            positions=state.positions(slots),
            drawn=drawn,
            items=feeds.values(slots) if feeds is not None else None,
            forced=forced,
            masks=self._masks(decoding, forced),
            steps=steps,
            left=left + 1 if steps > 1 else None,
        )
        after = left + 1 - steps
        tables.length[slots], state.drawn[slots], state.left[slots] = lengths + steps, drawn + steps, after
        state.next_position[slots] += steps
        if np.count_nonzero(after > 0) < len(after):
            for index in np.nonzero(after <= 0)[0].tolist():
                self._requests.leave_decode(int(decoding.keys[index]))
        if feeds is not None:
            feeds.take(slots)
            for index in np.nonzero(feeds.dry(slots) & (left > 0))[0].tolist():
                key = int(decoding.keys[index])
                if self._requests.leave_decode(key):
                    self._requests.starving[key] = decoding.sequences[index]
        return plan, lengths + 1, left

    def _forced(self, decoding: Decoding, left: np.ndarray) -> np.ndarray | None:
        """Return the known ids that this step takes, -1 for none: int64 [n]. left: iterations left after it."""
        forced = np.full(len(left), -1, dtype=np.int64)
        for index, branch in enumerate(decoding.sequences):
            loop = branch.loop_state
            iteration = loop.limit - int(left[index]) - 1
            if decoding.batch.sampling[index].logprobs is not None and iteration < len(loop.spec.known):
                forced[index] = loop.spec.known[iteration]
        return forced if (forced >= 0).any() else None

    def _masks(self, decoding: Decoding, forced: np.ndarray | None) -> Masks | None:
        """Return the masks of the constrained sequences, see DecodePlan. forced: known ids, which no mask forbids."""
        rows = decoding.batch.mask_rows
        if rows is None:
            return None
        grammars = self._grammars
        assert grammars is not None
        is_free = np.zeros(len(rows), dtype=np.bool_) if forced is None else forced >= 0
        free = is_free[rows >= 0].tolist()
        matchers = [None if skip else each for each, skip in zip(decoding.matchers, free, strict=True)]
        return Masks(lambda: grammars.masks(matchers))

    # -- once a step has come to the host ----------------------------------------------------------------------------

    def commit(self, step: KVStep, launch: Launch) -> None:
        """Take the ids that a launch drew for its decode batch, and end the loops that have ended."""
        assert launch.output is not None
        if launch.steps > 1:
            parts = [self._commit_each(step, launch)]
        else:
            parts = [self._commit(step, launch, part) for part in launch.output.decode]
        for part in launch.output.decode:
            if part.drawn.scores is not None:
                self._take_scores(step, launch, part.drawn.scores.wait().numpy(), part)
        drawn = [(keys, ids) for keys, ids in parts if len(keys)]
        if step.result.loop is not None:  # known ids
            drawn.insert(0, (step.result.loop.keys, step.result.loop.ids))
        if drawn:
            keys, ids = drawn[0] if len(drawn) == 1 else (np.concatenate(parts) for parts in zip(*drawn, strict=True))
            step.result.loop = LoopStep(keys=keys, ids=ids, steps=launch.steps)

    def _take_scores(self, step: KVStep, launch: Launch, scores: np.ndarray, part: DecodeOutput) -> None:
        """Take the log-probabilities of a part of the decode batch. scores: float64 [n, WIDTH]."""
        assert launch.decoding is not None
        span = slice(part.start, part.start + part.count)
        keys, sampling = launch.decoding.keys[span].tolist(), launch.decoding.batch.sampling[span]
        for key, params, numbers in zip(keys, sampling, scores, strict=False):
            if params.logprobs is not None and key not in step.dropped:
                step.result.scores[key] = numbers[: 1 + 2 * params.logprobs]

    def end_with_streams(self, result: StepResult) -> None:
        """End the loops whose stream is over once their last iteration is collected."""
        feeds = self._memory.feeds
        assert feeds is not None
        for key, branch in list(self._requests.starving.items()):
            if feeds.is_over(branch.slot) and not self._requests.is_in_flight(key):
                slots, loop = self._memory.slots, branch.loop_state
                iterations = loop.limit - int(slots.left[branch.slot])
                self.end_loop(result, branch, int(slots.last[branch.slot]), "done", iterations)

    def _commit(self, step: KVStep, launch: Launch, part: DecodeOutput) -> tuple[np.ndarray, np.ndarray]:
        """Take the ids that a part of the decode batch drew. Returns keys and ids of those that count."""
        assert launch.decoding is not None
        sequences, slots, keys = launch.decoding.sequences, launch.decoding.batch.slots, launch.decoding.keys
        left, place, ids = launch.left, launch.place, part.drawn.host.wait().numpy()[: part.count]
        rows = launch.decoding.batch.mask_rows
        if part.count < len(slots):
            span = slice(part.start, part.start + part.count)
            sequences, slots, keys, left, place = sequences[span], slots[span], keys[span], left[span], place[span]
        counts = None
        if step.dropped:
            counts = ~np.isin(keys, list(step.dropped))
            slots, keys, left, place, ids = slots[counts], keys[counts], left[counts], place[counts], ids[counts]
        errors = {} if rows is None else self._advance(keys, ids)
        errors |= self._port_faults(launch.decoding.batch.reports, part, keys)
        if errors:
            ids = np.where(np.isin(keys, list(errors)), NO_ID, ids)
        state = self._memory.slots
        state.history[slots, place] = ids
        state.last[slots] = ids
        # count_nonzero is numpy's cheapest test; sequences are looked at only when one has ended.
        hits = state.stop_ids[slots] == ids[:, None]
        if part.reports:
            step.result.emissions += self._emissions(part, sequences, counts, left)
        if np.count_nonzero(hits) or np.count_nonzero(left) < len(left):
            if self._finish_loops(step.result, keys, ids, left, hits.any(axis=1), errors):
                keys, ids = keys[ids >= 0], ids[ids >= 0]
        return keys, ids

    def _commit_each(self, step: KVStep, launch: Launch) -> tuple[np.ndarray, np.ndarray]:
        """Take the ids of a launch of several steps. Returns keys and ids of those that count, in the order of steps.

        A sequence that ends counts up to its last id: what the steps behind it have done for it is undone.
        """
        assert launch.decoding is not None and launch.output is not None
        slots, keys, left, place, steps = (
            *(launch.decoding.batch.slots, launch.decoding.keys, launch.left, launch.place),
            launch.steps,
        )
        ids = np.full((steps, len(slots)), NO_ID, dtype=np.int64)
        for part in launch.output.decode:
            drawn = part.drawn.host.wait().numpy().reshape(-1, part.count)
            ids[part.first : part.first + len(drawn), part.start : part.start + part.count] = drawn
        if step.dropped:
            counts = ~np.isin(keys, list(step.dropped))
            slots, keys, left, place, ids = slots[counts], keys[counts], left[counts], place[counts], ids[:, counts]
        state, numbers, columns = self._memory.slots, np.arange(steps)[:, None], np.arange(len(keys))
        stopped = (state.stop_ids[slots] == ids[:, :, None]).any(axis=2)
        ends = stopped | (ids < 0) | (left <= numbers)
        taken = np.where(ends.any(axis=0), ends.argmax(axis=0) + 1, steps)
        counted = numbers < taken
        rows, at = np.nonzero(counted)
        state.history[slots[at], place[at] + rows] = ids[counted]
        last = ids[taken - 1, columns]
        state.last[slots] = last
        if ends.any():
            over = left + 1 - taken, stopped[taken - 1, columns]
            self._finish_loops(step.result, keys, last, *over, {}, steps - taken)
            counted &= ids >= 0
        return np.broadcast_to(keys, ids.shape)[counted], ids[counted]

    def _port_faults(self, reports: frozenset[str], part: DecodeOutput, keys: np.ndarray) -> dict[int, EngineError]:
        """Return the errors of the sequences whose ports the forward lacks or gives in another form, by key."""
        try:
            self._check.require(reports, part.given, part.reports)
        except EngineError:
            return dict(self._faults_of(part, keys))
        return {}

    def _faults_of(self, part: DecodeOutput, keys: np.ndarray) -> Iterator[tuple[int, EngineError]]:
        for key in keys.tolist():
            emits = self._requests.looping[key].loop_state.spec.emit
            values = {port: value for port, value in part.reports.items() if port in emits}
            try:
                self._check.require(emits, part.given, values)
            except EngineError as error:
                yield key, error

    def _advance(self, keys: np.ndarray, ids: np.ndarray) -> dict[int, EngineError]:
        """Let matchers take the ids that constrained sequences drew. Returns the errors of those that fail, by key."""
        assert self._grammars is not None
        taking = [
            (key, drawn, branch.matcher)
            for key, drawn in zip(keys.tolist(), ids.tolist(), strict=True)
            if drawn >= 0 and (branch := self._requests.looping[key]).matcher is not None
        ]
        if not taking:
            return {}
        matchers = [matcher for _, _, matcher in taking]
        failed = self._grammars.advance(matchers, [drawn for _, drawn, _ in taking])
        return {taking[place][0]: matchers[place].failure() for place in failed}

    def _finish_loops(
        self,
        result: StepResult,
        keys: np.ndarray,
        ids: np.ndarray,
        left: np.ndarray,
        stopped: np.ndarray,
        errors: Mapping[int, EngineError],
        behind: np.ndarray | None = None,
    ) -> bool:
        """End the loops that stopped, ran out of iterations, or drew no valid id. True if one did the last.

        errors: by key, those of matchers. behind: int64 [n], steps of their own launch behind the last id of each.
        """
        has_bad = False
        for index in np.nonzero(stopped | (left == 0) | (ids < 0))[0].tolist():
            branch = self._requests.looping[int(keys[index])]
            job = branch.job
            assert job is not None
            iterations = branch.loop_state.limit - int(left[index])
            self._undo(branch, int(keys[index]), 0 if behind is None else int(behind[index]))
            if ids[index] < 0:
                has_bad = True
                error = errors.get(int(keys[index])) or no_id(self._requests.node)
                self._requests.fail(branch, job, error, result)
                continue
            self.end_loop(result, branch, int(ids[index]), "stop" if stopped[index] else "length", iterations)
        return has_bad

    def end_loop(self, result: StepResult, branch: Branch, last: int, reason: str, iterations: int) -> None:
        """Report the end of a resident loop and let its branch go on."""
        assert branch.job is not None
        outputs = self._loops.last_outputs(branch, branch.job, last)
        first = branch.loop_state.base + 1
        drawn = self._memory.slots.history[branch.slot, first : first + iterations].astype(np.int64)
        result.done.append(Done(job=branch.job, outputs=outputs, reason=reason, iterations=iterations, drawn=drawn))
        self._memory.slots.set_last(branch.slot, last)
        branch.request.last_values.update(outputs)
        self._loops.sync_log(branch)
        self._loops.extend_by_loop(branch, branch.logged)
        self._pages.offer_prefix(branch)
        self._requests.stop_decoding(branch)
        branch.job = branch.loop = None
        self._requests.requeue(branch)

    def _undo(self, branch: Branch, key: int, behind: int) -> None:
        """Undo what later steps have done for a loop that had already ended. behind: those of the same launch."""
        for later in self._requests.in_flight:
            behind += later.decodes(key)
            later.dropped.add(key)
        if not behind:
            return
        if branch.is_evicted:  # a preemption has taken its pages, and logged what these steps were to append
            branch.forget(behind)
        else:
            self._memory.tables.truncate(branch.slot, behind)
        self._memory.slots.next_position[branch.slot] -= behind
        self._memory.slots.drawn[branch.slot] -= behind

    def _emissions(
        self, part: DecodeOutput, sequences: list[Branch], counts: np.ndarray | None, left: np.ndarray
    ) -> Iterator[Emission]:
        """Yield what loops of the decode batch emit besides their ids. counts: sequences whose ids count, None: all."""
        at = 0
        shares = {port: self._shares(port, value) for port, value in part.reports.items()}
        for index, branch in enumerate(sequences):
            if counts is not None and not counts[index]:
                continue
            job, loop = branch.job, branch.loop
            if job is not None and loop is not None and job.loop is not None and job.loop.emit:
                values = {port: shares[port][index] for port in job.loop.emit if port in shares}
                is_dry = self._requests.is_starving(branch)
                yield Emission(job=job, iteration=loop.limit - int(left[at]) - 1, outputs=values, is_dry=is_dry)
            at += 1

    def _shares(self, port: str, value: Tensor) -> Sequence[Tensor]:
        """Return each sequence's share of a reported port: its value where the type is fixed, else one row."""
        is_whole = value.dim() - 1 == self._fixed_ranks.get(port)
        shares: tuple[Tensor, ...] = value.unbind(0) if is_whole else value.split(1)
        return shares
