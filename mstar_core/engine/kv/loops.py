"""What a job does to its branch: starting forwards and loops, carrying values, logging. Called by the KV engine.

A loop that feeds its sampled id back is *resident*: its row lives in the decode arrays. Every other loop is a
sequence of forwards whose outputs are carried to the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.base import Done, Emission
from mstar_core.engine.cache.slots import NO_ID
from mstar_core.engine.kv.sequence import Branch, CandidateJob, ForwardPass, Logged, LoopState, RollbackPoint
from mstar_core.engine.loop_rules import carried_values, no_start, stops
from mstar_core.errors import EngineError, TooLarge
from mstar_core.graph.spec.nodes import MAIN, STEP

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Job, LoopSpec
    from mstar_core.engine.cache.page_table import PageTables
    from mstar_core.engine.cache.slots import Slots
    from mstar_core.engine.kv.inputs import InputProcessor
    from mstar_core.graph.spec.nodes import NodeSpec


MOST_AHEAD: Final = 16
"""Iterations of a loop that one pass holds at most: the rows of a small batch."""


class _Numbers(dict[int, "Tensor"]):
    """0-d tensors of whole numbers on the host, made once each."""

    def __missing__(self, number: int) -> Tensor:
        return self.setdefault(number, torch.tensor(number, dtype=torch.int64))


class Loops:
    """Starts and advances the jobs of one node. Holds no state of its own beyond the engine's arrays."""

    def __init__(self, slots: Slots, tables: PageTables, intake: InputProcessor, spec: NodeSpec, vocab: int) -> None:
        self._slots = slots
        self._tables = tables
        self._intake = intake
        self._spec = spec
        self._vocab = vocab
        self._port = spec.sampling.port if spec.sampling else None
        self._sees_input = spec.sampling is not None and spec.sampling.history == "all"
        self._steps = _Numbers()
        self._most_ahead = min(MOST_AHEAD, max(spec.capture_sizes, default=MOST_AHEAD))

    def wanted(self, job: Job) -> frozenset[str]:
        """Ports, other than the sampled one, that the module has to give for this job."""
        ports = set(job.outputs)
        if job.loop is not None:
            ports.update(job.loop.carry, job.loop.emit, filter(None, [job.loop.stop_port]))
        return frozenset(ports - {self._port})

    def start(self, branch: Branch, job: Job) -> Done | None:
        """Prepare a job; a Done when there is nothing to run. Raises MstarError when it cannot be run."""
        self._keep_or_drop(branch, job)
        if job.loop is None:
            step = job.inputs.get(STEP)
            branch.forward = self._first_forward(branch, job, job.inputs, 0 if step is None else int(step))
            return None
        if self._is_resident(branch, job, job.loop):
            return self._start_resident(branch, job, job.loop)
        return self._start_general(branch, job, job.loop)

    def advance(
        self, branch: Branch, job: Job, forward: ForwardPass, drawn: Tensor | None
    ) -> tuple[Emission | None, Done | None]:
        """Finish one iteration of a general loop: what it emits, and its end or (None) the next forward."""
        spec, loop = job.loop, branch.loop
        assert spec is not None and loop is not None
        outputs = {
            port: values[0] if len(values) == 1 else torch.cat(values) for port, values in forward.chunk_outputs.items()
        }
        if drawn is not None and self._port is not None:
            outputs[self._port] = drawn
        missing = sorted(set(spec.carry) - set(outputs))
        if missing:
            raise EngineError(
                f"node {self._spec.name} did not give {missing[0]!r}, which its loop carries", node=self._spec.name
            )
        emission = None
        if spec.emit:
            values = {port: outputs[port] for port in spec.emit if port in outputs}
            emission = Emission(job=job, iteration=loop.iteration, outputs=values)
        loop.iteration += 1
        loop.carried = {into: outputs[port] for port, into in spec.carry.items()}
        is_stopped = spec.stop_port in outputs and stops(spec, outputs[spec.stop_port])
        if is_stopped or loop.iteration >= loop.limit:
            self._hold(branch, {port: outputs[port] for port in spec.carry})
            if job.attend.keep == "loop":
                self.drop(branch)
            kept = {port: outputs[port] for port in job.outputs if port in outputs}
            return emission, Done(
                job=job, outputs=kept, reason="stop" if is_stopped else "length", iterations=loop.iteration
            )
        if not job.attend.write:
            job.inputs = self._intake.kept(job.inputs)
        branch.forward = self._iteration(branch, job, loop)
        return emission, None

    def last_id(self, job: Job, value: int) -> dict[str, Tensor]:
        """Outputs of a resident loop that ended: its last id, int64 [1] on the host."""
        assert self._port is not None
        return {self._port: torch.tensor([value], dtype=torch.int64)}

    def position_after(self, branch: Branch, forward: ForwardPass) -> int:
        """Where the branch goes on after a pass; one that does not write moves nothing."""
        if not forward.attend.write:
            return int(self._slots.next_position[branch.slot])
        return forward.next_position

    def log(self, branch: Branch, forward: ForwardPass) -> None:
        """Remember how a stretch of the cache was made."""
        attend = forward.attend
        is_plain = forward.is_ids and attend.mask == "causal" and attend.positions == "running"
        kept = None if is_plain else self._intake.owned(forward)
        branch.record(Logged(tokens=forward.tokens, position=forward.position, forward=kept))

    def sync_log(self, branch: Branch) -> None:
        """Log the ids that a resident loop has appended since the last time."""
        if not branch.is_decoding or branch.replay or branch.is_evicted:
            return
        extra = int(self._tables.length[branch.slot]) - branch.logged
        if extra > 0:
            branch.record(Logged(tokens=extra, position=int(self._slots.next_position[branch.slot]) - extra))

    def rebuild(self, branch: Branch) -> None:
        """Queue the passes that compute a preempted branch again."""
        base = branch.base
        for entry in branch.log:
            branch.replay.append(self._intake.replayed(entry, base, self._slots.history[branch.slot]))
            base += entry.tokens

    def _hold(self, branch: Branch, values: dict[str, Tensor]) -> None:
        if branch.trunk is None:
            branch.request.held.update(values)
        elif isinstance(branch.job, CandidateJob):
            branch.job.group.held[branch.job.row].update(values)

    # -- starting ----------------------------------------------------------------------------------------------------

    def _first_forward(
        self, branch: Branch, job: Job, inputs: dict[str, Tensor], step: int = 0, iterations: int = 1
    ) -> ForwardPass:
        slot = branch.slot
        position = int(self._slots.next_position[slot])
        forward = self._intake.forward(inputs, job.attend, position, branch.logged, step=step, iterations=iterations)
        if forward.attend.write and forward.base + forward.tokens > self._tables.max_tokens:
            raise TooLarge(
                f"the sequence outgrows node {self._spec.name}",
                f"{forward.base} tokens are cached and {forward.tokens} more exceed {self._tables.max_tokens}",
                "shorten the input or raise max_seq_len",
                value=forward.base + forward.tokens,
                allowed=self._tables.max_tokens,
            )
        ids = self._take_ids(slot, forward) if forward.is_ids else None
        if forward.attend.write:
            self._slots.history[slot, forward.base : forward.base + forward.tokens] = NO_ID if ids is None else ids
            if job.attend.keep != "loop":  # what will be dropped again is not part of the page keys
                self._chain(branch, job, ids, forward.tokens)
        return forward

    def _chain(self, branch: Branch, job: Job, ids: np.ndarray | None, tokens: int) -> None:
        """Extend the page keys of the branch. ids: int32 [tokens], None where the tokens are not ids."""
        seed = job.tokens_hash_seed
        if seed is None or not branch.chain.is_open:
            branch.chain.is_open = False
            return
        if ids is None:
            ids = np.full(tokens, NO_ID, dtype=np.int32)
        kind = f"{job.attend.mask},{job.attend.positions};".encode()
        branch.chain.extend(ids, kind + seed)

    def _keep_or_drop(self, branch: Branch, job: Job) -> None:
        """RollbackPoint where a loop's own tokens begin, and drop those of a loop that is over.

        A loop that this engine iterates alone drops its tokens at its end. Between single forwards the end shows
        in the next job: one that stays, or the first iteration of the next loop.
        """
        if branch.trunk is not None and branch.trunk.rows is not None and branch.trunk.rows.is_for_loop:
            return  # the whole row goes with its loop
        step = job.inputs.get(STEP)
        if branch.mark is not None and (job.attend.keep == "request" or (step is not None and int(step) == 0)):
            self.drop(branch)
        if branch.mark is None and job.attend.keep == "loop" and job.attend.write:
            position = int(self._slots.next_position[branch.slot])
            branch.mark = RollbackPoint(log=tuple(branch.log), logged=branch.logged, position=position)

    def drop(self, branch: Branch) -> None:
        """Return a branch to its mark, where it has one."""
        mark = branch.mark
        if mark is None:
            return
        if not branch.is_evicted:
            self._tables.truncate(branch.slot, int(self._tables.length[branch.slot]) - mark.logged)
        branch.log, branch.logged, branch.mark = list(mark.log), mark.logged, None
        branch.is_evicted = branch.is_evicted and mark.logged > 0
        self._slots.next_position[branch.slot] = mark.position

    def _take_ids(self, slot: int, forward: ForwardPass) -> np.ndarray:
        """Ids of a forward for the history, int32; checked against the vocabulary, which a kernel would not forgive."""
        # A copy only where another node left the ids on a device: prompts come on the host and stay there.
        host = forward.ports[self._intake.id_port] = forward.ports[self._intake.id_port].cpu()
        ids = host.numpy()
        if self._vocab and (ids.min() < 0 or ids.max() >= self._vocab):
            wrong = int(ids[(ids < 0) | (ids >= self._vocab)][0])
            raise EngineError(
                f"an input id is outside the vocabulary of node {self._spec.name}",
                f"id {wrong}, vocabulary {self._vocab}",
                node=self._spec.name,
            )
        self._see(slot, ids)
        converted: np.ndarray = ids.astype(np.int32)
        return converted

    def _see(self, slot: int, ids: np.ndarray) -> None:
        if self._sees_input and self._slots.sampling[slot].repetition_penalty != 1:
            self._slots.see(slot, ids)

    def _is_resident(self, branch: Branch, job: Job, loop: LoopSpec) -> bool:
        if branch.trunk is not None or self._port is None or set(loop.carry) != {self._port}:
            return False
        if loop.stop_port not in (None, self._port):
            return False
        into = loop.carry[self._port]
        if job.attend.keep == "loop":
            return False
        plain = job.attend.mask == "causal" and job.attend.positions == "running" and job.attend.write
        return plain and self._intake.is_id_port(into) and set(job.inputs) <= {into}

    def _start_resident(self, branch: Branch, job: Job, loop: LoopSpec) -> Done | None:
        assert self._port is not None
        slots, slot = self._slots, branch.slot
        given = job.inputs.get(loop.carry[self._port])
        if given is not None:
            if given.numel() != 1:
                raise EngineError(
                    f"a loop of node {self._spec.name} starts from one id",
                    f"{given.numel()} were given",
                    node=self._spec.name,
                )
            value = int(given.reshape(()).item())
            if not 0 <= value < self._vocab:
                raise EngineError(
                    f"an input id is outside the vocabulary of node {self._spec.name}",
                    f"id {value}, vocabulary {self._vocab}",
                    node=self._spec.name,
                )
        else:
            value = int(slots.last[slot])
            if value == NO_ID and branch.name != MAIN and MAIN in branch.request.branches:
                value = int(slots.last[branch.request.branches[MAIN].slot])
        if value == NO_ID:
            raise no_start(self._spec.name, self._port)
        if value in loop.stop_ids or loop.max_iters <= 0:
            reason = "stop" if value in loop.stop_ids else "length"
            return Done(job=job, outputs=self.last_id(job, value), reason=reason)
        limit = min(loop.max_iters, self._tables.max_tokens - branch.logged)
        if limit <= 0:
            return Done(job=job, outputs=self.last_id(job, value), reason="length")
        slots.set_last(slot, value)
        slots.history[slot, branch.logged] = value
        if given is not None:
            self._see(slot, np.array([value], dtype=np.int64))
        slots.begin_loop(slot, int(job.key), limit, loop.stop_ids)
        # What a loop appends is not offered to others: its page keys would have to be made per token.
        branch.chain.is_open = False
        branch.loop = LoopState(carried={}, limit=limit)
        branch.is_decoding = True
        return None

    def _start_general(self, branch: Branch, job: Job, loop: LoopSpec) -> Done | None:
        values = carried_values(loop, job.inputs, branch.request.held, self._spec.name)
        # What appends gives most of them on the device; what reads takes the first alone, all its iterations at once.
        place = self._intake.on_device if job.attend.write else self._intake.at_hand
        carried = {into: place(into, value) for into, value in values.items()}
        start = {port: carried[into] for port, into in loop.carry.items()}
        is_stopped = loop.stop_port in start and stops(loop, start[loop.stop_port])
        if is_stopped or loop.max_iters <= 0:
            kept = {port: value for port, value in start.items() if port in job.outputs}
            return Done(job=job, outputs=kept, reason="stop" if is_stopped else "length")
        branch.loop = LoopState(
            carried=carried, limit=loop.max_iters, ahead=self._ahead(job, loop), lists=self._intake.lists(job.inputs)
        )  # fmt: skip
        branch.forward = self._iteration(branch, job, branch.loop)
        return None

    def _ahead(self, job: Job, loop: LoopSpec) -> int:
        """Iterations that one pass may hold: several where none waits for what another gives, and nobody asks."""
        is_free = loop.fused and not loop.carry and loop.stop_port is None and not self.wanted(job)
        return self._most_ahead if is_free and self._intake.holds_iterations(job.inputs, job.attend) else 1

    def _iteration(self, branch: Branch, job: Job, loop: LoopState) -> ForwardPass:
        inputs = {**job.inputs, **loop.lists, **loop.carried}
        inputs.pop(STEP, None)
        is_only_ids = all(map(self._intake.is_id_port, inputs))  # as in the decode rows, which count no steps
        if STEP in job.inputs or (self._intake.takes_step and not is_only_ids):
            inputs[STEP] = self._steps[loop.iteration]
        many = min(loop.ahead, loop.limit - loop.iteration)
        return self._first_forward(branch, job, inputs, loop.iteration, many)
