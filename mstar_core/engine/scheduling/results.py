"""Results of a KV node's steps: values of loops carried on once a step is launched, ids once they came to the host.

Part of the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.base import Done, Emission, LoopStep, StepResult
from mstar_core.engine.ports import fixed_ranks
from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.scheduling.candidates import Candidates
    from mstar_core.engine.scheduling.loops import Loops
    from mstar_core.engine.scheduling.pages import Pages
    from mstar_core.engine.scheduling.requests import Requests
    from mstar_core.engine.scheduling.sequence import Branch
    from mstar_core.engine.scheduling.step import KVStep, Launch, ScheduledPass
    from mstar_core.engine.steps.output import DecodeOutput, PassOutput, StepOutput
    from mstar_core.graph.declare.nodes import NodeSpec

FUSED_TOKENS: Final = 65536
"""Tokens of one step after which fused loops continue in the next one, so that a long rollout delays no other node."""


class Results:
    """Moves branches on by what their steps gave. It keeps no state."""

    def __init__(self, spec: NodeSpec, requests: Requests, loops: Loops, candidates: Candidates, pages: Pages) -> None:
        self._port = spec.sampling.port if spec.sampling else None
        self._fixed_ranks = fixed_ranks(spec)
        self._requests = requests
        self._memory = requests.memory
        self._loops = loops
        self._candidates = candidates
        self._pages = pages

    # -- after a launch ----------------------------------------------------------------------------------------------

    def settle(self, step: KVStep, output: StepOutput) -> list[Branch]:
        """Take the output of a step's newest plan. Returns the branches whose fused loops go on within the step."""
        launch, result = step.launches[-1], step.result
        launch.output = output
        for slot, error in output.failed.items():
            branch = launch.branch_of(slot)
            if branch.job is not None:
                self._requests.fail(branch, branch.job, error, result)
        count = sum(part.count for part in output.decode)
        if count:
            self._requests.decode_since = self._requests.clock()
        result.tokens += count
        if len(step.launches) == 1:  # the iterations of a fused loop have the same batch items
            result.rows = count + sum(part is not None for part in output.passes)
        passes = zip(launch.passes, output.passes, strict=True)
        return [one.branch for one, part in passes if part is not None and self._settle(step, one, part)]

    def _settle(self, step: KVStep, one: ScheduledPass, part: PassOutput) -> bool:
        """Move a branch on after a part of its pass. True when a fused loop goes on within this step."""
        branch, forward = one.branch, one.forward
        self._count(step, one, part.iterations)
        for port, value in part.ports.items():
            forward.chunk_outputs.setdefault(port, []).append(value)
        branch.waiting_since = self._requests.clock()
        if not one.is_last or branch.job is not one.job:
            return False
        if forward.is_replay:
            branch.replay.popleft()
            branch.is_evicted = branch.is_evicted and bool(branch.replay)
            return False
        self._finish_pass(branch)
        if branch.loop is None:
            branch.forward = None
            self._hold(step, branch)
            return False
        drawn = part.drawn.ids[part.index : part.index + 1] if part.drawn is not None else None
        goes_on = self._iterate(step, branch, part.iterations, drawn)
        for ports in part.later:
            # Computed already: its pass is only counted.
            if branch.job is not one.job or branch.forward is None:
                break
            forward = branch.forward
            self._count(step, one, 1)
            forward.done, forward.chunk_outputs = forward.tokens, {port: [value] for port, value in ports.items()}
            self._memory.tables.length[branch.slot] += forward.tokens
            self._finish_pass(branch)
            goes_on = self._iterate(step, branch, 1, None)
        return goes_on

    def _count(self, step: KVStep, one: ScheduledPass, iterations: int) -> None:
        """Count a computed part of a pass; tokens of a repeated pass count once per iteration."""
        if one.job is not None:  # a replay is part of the interrupted job
            step.result.ran.append(one.job.key)
        step.result.tokens += one.count * iterations // one.forward.iterations

    def _finish_pass(self, branch: Branch) -> None:
        forward = branch.forward
        assert forward is not None
        self._loops.finish_pass(branch, forward)
        if forward.attend.write:
            self._pages.offer_prefix(branch)

    def _iterate(self, step: KVStep, branch: Branch, iterations: int, drawn: Tensor | None) -> bool:
        """Carry a general loop's values to its next iteration, or end it."""
        job, forward = branch.job, branch.forward
        assert job is not None and job.loop is not None and forward is not None
        branch.loop_state.iteration += iterations - 1
        try:
            emission, ended = self._loops.advance(branch, job, forward, drawn)
        except Exception as error:  # noqa: BLE001 a module that omits a carried port fails its own request only
            self._requests.fail(branch, job, error, step.result)
            return False
        if emission is not None:
            step.result.emissions.append(emission)
        if ended is not None:
            step.result.done.append(ended)
            self._requests.remember(branch, ended.outputs)
            branch.job = branch.forward = branch.loop = None
            self._hold(step, branch)
            return False
        branch.is_reserved = False
        return job.loop.fused and not job.loop.emit and step.result.tokens < FUSED_TOKENS

    def _hold(self, step: KVStep, branch: Branch) -> None:
        """Let a branch wait until a step is collected."""
        branch.in_flight += 1
        step.held.append(branch)

    # -- once a step has come to the host ----------------------------------------------------------------------------

    def commit(self, step: KVStep) -> StepResult:
        """Return the results of the oldest step, whose ids and copies have come to the host."""
        result = step.result
        drawn: list[tuple[np.ndarray, np.ndarray]] = []
        for launch in step.launches:
            assert launch.output is not None
            for part in launch.output.decode:
                self._commit_decode(step, launch, part, drawn)
            for one, output in zip(launch.passes, launch.output.passes, strict=True):
                if output is not None:
                    self._commit_pass(result, one, output)
        if self._requests.starving:
            self.end_with_streams(result)
        for branch in step.held:
            branch.in_flight -= 1
            if not branch.has_work:  # a general loop has ended, and no job follows yet
                self._requests.remove(branch)
        self._requests.has_changed = True
        if drawn:
            keys, ids = drawn[0] if len(drawn) == 1 else (np.concatenate(parts) for parts in zip(*drawn, strict=True))
            result.loop = LoopStep(keys=keys, ids=ids)
        if result.done or result.failed or result.emissions:
            with torch.inference_mode():
                self._candidates.merge(result)
            result.drop_closed(self._requests.requests)
        return result

    def end_with_streams(self, result: StepResult) -> None:
        """End the loops whose stream is over once their last iteration is collected."""
        feeds = self._memory.feeds
        assert feeds is not None
        for key, branch in list(self._requests.starving.items()):
            if feeds.is_over(branch.slot) and not self._requests.is_in_flight(key):
                slots, loop = self._memory.slots, branch.loop_state
                iterations = loop.limit - int(slots.left[branch.slot])
                self._end_loop(result, branch, int(slots.last[branch.slot]), "done", iterations)

    def _commit_decode(
        self, step: KVStep, launch: Launch, part: DecodeOutput, drawn: list[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        """Take the ids that a part of the decode batch drew. drawn: keys and ids of all parts."""
        assert launch.decoding is not None
        sequences, slots, keys = launch.decoding.sequences, launch.decoding.batch.slots, launch.decoding.keys
        left, place, ids = launch.left, launch.place, part.drawn.host.wait().numpy()[: part.count]
        if part.count < len(slots):
            span = slice(part.start, part.start + part.count)
            sequences, slots, keys, left, place = sequences[span], slots[span], keys[span], left[span], place[span]
        counts = None
        if step.dropped:
            counts = ~np.isin(keys, list(step.dropped))
            slots, keys, left, place, ids = slots[counts], keys[counts], left[counts], place[counts], ids[counts]
        state = self._memory.slots
        state.history[slots, place] = ids
        state.last[slots] = ids
        # count_nonzero is numpy's cheapest test; sequences are looked at only when one has ended.
        hits = state.stop_ids[slots] == ids[:, None]
        if part.reports:
            step.result.emissions += self._emissions(part, sequences, counts, left)
        if np.count_nonzero(hits) or np.count_nonzero(left) < len(left):
            if self._finish_loops(step.result, keys, ids, left, hits.any(axis=1)):
                keys, ids = keys[ids >= 0], ids[ids >= 0]
        if len(keys):
            drawn.append((keys, ids))

    def _finish_loops(
        self, result: StepResult, keys: np.ndarray, ids: np.ndarray, left: np.ndarray, stopped: np.ndarray
    ) -> bool:
        """End the loops that stopped, ran out of iterations, or drew no valid id. True if one did the last."""
        has_bad = False
        for index in np.nonzero(stopped | (left == 0) | (ids < 0))[0].tolist():
            branch = self._requests.looping[int(keys[index])]
            job = branch.job
            assert job is not None
            iterations = branch.loop_state.limit - int(left[index])
            self._undo(branch, int(keys[index]))
            if ids[index] < 0:
                has_bad = True
                self._requests.fail(branch, job, self._no_id(), result)
                continue
            self._end_loop(result, branch, int(ids[index]), "stop" if stopped[index] else "length", iterations)
        return has_bad

    def _end_loop(self, result: StepResult, branch: Branch, last: int, reason: str, iterations: int) -> None:
        """Report the end of a resident loop and let its branch go on."""
        assert branch.job is not None
        outputs = self._loops.last_outputs(branch, branch.job, last)
        result.done.append(Done(job=branch.job, outputs=outputs, reason=reason, iterations=iterations))
        self._memory.slots.set_last(branch.slot, last)
        branch.request.last_values.update(outputs)
        self._loops.sync_log(branch)
        self._requests.stop_decoding(branch)
        branch.job = branch.loop = None
        self._requests.requeue(branch)

    def _undo(self, branch: Branch, key: int) -> None:
        """Undo what later steps in flight have done for a loop that had already ended."""
        for later in self._requests.in_flight:
            if later.decodes(key):
                later.dropped.add(key)
                self._memory.tables.truncate(branch.slot, 1)
                self._memory.slots.next_position[branch.slot] -= 1
                self._memory.slots.drawn[branch.slot] -= 1

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
                yield Emission(job=job, iteration=loop.limit - int(left[at]) - 1, outputs=values)
            at += 1

    def _shares(self, port: str, value: Tensor) -> Sequence[Tensor]:
        """Return each sequence's share of a reported port: its value where the type is fixed, else one row."""
        is_whole = value.dim() - 1 == self._fixed_ranks.get(port)
        shares: tuple[Tensor, ...] = value.unbind(0) if is_whole else value.split(1)
        return shares

    def _commit_pass(self, result: StepResult, one: ScheduledPass, output: PassOutput) -> None:
        branch, job = one.branch, one.job
        if job is None or self._requests.requests.get(job.handle) is not branch.request:
            return
        drawn = None
        if one.samples:
            assert output.drawn is not None
            drawn = int(output.drawn.host.wait()[output.index])
            if drawn < 0:
                self._requests.fail(branch, job, self._no_id(), result)
                return
            if branch.slot >= 0:  # a candidate may have been freed
                self._memory.slots.last[branch.slot] = drawn
        if not one.is_last or one.forward.is_replay or job.loop is not None or branch.job is not job:
            return
        outputs = one.forward.outputs
        if drawn is not None and self._port is not None:
            # On the host, where it is known: reading it from the GPU again would wait for later launches.
            outputs[self._port] = torch.tensor([drawn], dtype=torch.int64)
        result.done.append(Done(job=job, outputs=outputs, cached_tokens=branch.cached_tokens))
        self._requests.remember(branch, outputs)
        branch.job = None
        self._requests.requeue(branch)

    def _no_id(self) -> EngineError:
        node = self._requests.node
        return EngineError(f"node {node} gave no finite logits for this request", node=node)
