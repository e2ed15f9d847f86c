"""Ids that an earlier attempt of a request drew, taken instead of drawing them again. Part of the scheduler.

A resident loop computes the iterations of all known ids in one pass and then decodes. Loops of other kinds, single
passes and loops that report log-probabilities take their known ids one by one. Everything that a draw changes is as if
the ids had been drawn: last ids, counters of random numbers, seen ids and counts, iterations left, stop ids, and items
of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.base import Emission, LoopStep
from mstar_core.engine.scheduling.sequence import ForwardPass, KnownIterations, Logged
from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import Attend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from mstar_core.engine.base import Job, StepResult
    from mstar_core.engine.scheduling.decode_batch import DecodeScheduler
    from mstar_core.engine.scheduling.inputs import InputProcessor
    from mstar_core.engine.scheduling.requests import Requests
    from mstar_core.engine.scheduling.sequence import Branch
    from mstar_core.graph.declare.nodes import NodeSpec

KNOWN: Final = "known"
"""Keyword by which a module gets the values of its `known_ports`."""


class KnownIds:
    """Takes known ids at one node. Its state is that of the branches and slots."""

    def __init__(
        self,
        spec: NodeSpec,
        requests: Requests,
        inputs: InputProcessor,
        decode: DecodeScheduler,
        ports: Sequence[str],
    ) -> None:
        """ports: the module's `known_ports`."""
        self._requests = requests
        self._memory = requests.memory
        self._inputs = inputs
        self._decode = decode
        self._shapes = {port: tuple(int(size) for size in spec.port(port).shape) for port in ports}
        self._width = 1 + sum(prod(shape) for shape in self._shapes.values())

    # -- single draws ------------------------------------------------------------------------------------------------

    def check(self, job: Job) -> None:
        """Raise EngineError if the known id of a pass is none of this node."""
        if job.known is not None:
            self._check(np.array([job.known]))

    def replaces_draw(self, branch: Branch, job: Job) -> bool:
        """Return whether the next id of a pass is known, or the pass belongs to a resident loop."""
        if self._memory.slots.sampling[branch.slot].logprobs is not None and not branch.is_decoding:
            return False  # the id is drawn for its log-probability, and the known one taken
        if job.loop is None:
            return job.known is not None
        return branch.is_decoding or (branch.loop is not None and branch.loop.iteration < len(job.loop.known))

    def next_id(self, branch: Branch) -> Tensor | None:
        """Take the known id of a general loop's iteration: int64 [1] on the host. None if it is not known."""
        loop = branch.loop_state
        if loop.iteration >= len(loop.spec.known):
            return None
        known = loop.spec.known[loop.iteration : loop.iteration + 1]
        if branch.matcher is not None:
            branch.matcher.take(known)
        self.take(branch.slot, known)
        return torch.tensor([loop.spec.known[loop.iteration]], dtype=torch.int64)

    def take(self, slot: int, ids: Sequence[int] | np.ndarray) -> None:
        """Change the state of a slot as draws of these ids do. Raises EngineError for an id outside the vocabulary."""
        slots, values = self._memory.slots, np.array(ids, dtype=np.int64)
        self._check(values)
        slots.set_last(slot, int(values[-1]))
        slots.drawn[slot] += len(values)
        if slots.sampling[slot].repetition_penalty != 1:
            slots.see(slot, values)
        if slots.sampling[slot].adjusts:
            slots.count_drawn(slot, values)

    # -- resident loops ----------------------------------------------------------------------------------------------

    def begin(self, branch: Branch, job: Job) -> None:
        """Prepare the known iterations of a resident loop that starts, up to the one that ends it.

        A loop that keeps state needs a module with `known_ports`; without them it computes its iterations again.
        """
        loop, values = branch.loop_state, self._memory.loop
        assert job.loop is not None
        if not job.loop.known:
            return
        if self._memory.slots.sampling[branch.slot].logprobs is not None:
            self._check(np.array(job.loop.known[:: self._width]))
            return  # the decode batch takes them one by one, with their log-probabilities
        if values is not None and not set(job.loop.emit) <= self._shapes.keys():
            return
        count = min(len(job.loop.known) // self._width, loop.limit)
        rows = np.array(job.loop.known[: count * self._width], dtype=np.int64).reshape(count, self._width)
        stops = np.nonzero(np.isin(rows[:, 0], loop.spec.stop_ids))[0]
        if len(stops):
            rows = rows[: stops[0] + 1]
        if not len(rows):
            return
        self._check(rows[:, 0])
        loop.known = known = KnownIterations(rows[:, 0], rows[:, 1:])
        if values is not None:
            last = branch.request.last_values
            starts = {into: job.inputs[into] if into in job.inputs else last[out] for into, out in values.ports.states}
            known.states = {into: values.shaped(into, value)[None] for into, value in starts.items()}
        self.next_pass(branch)

    def next_pass(self, branch: Branch) -> bool:
        """Give a branch the pass over its next known iterations, and report them.

        Returns False if there are none, or if the stream has no item for them yet.
        """
        known = branch.loop.known if branch.loop is not None else None
        if known is None:
            return False
        slots, slot, feeds, left = self._memory.slots, branch.slot, self._memory.feeds, len(known.ids) - known.taken
        items = None if feeds is None else feeds.coming(slot, left)
        count = left if items is None else len(items)
        if not count:
            return False
        span, base = slice(known.taken, known.taken + count), branch.logged
        slots.history[slot, base] = slots.last[slot]
        slots.history[slot, base + 1 : base + count + 1] = known.ids[span]
        if self._memory.loop is None:
            entry = Logged(tokens=count, position=slots.position(slot))
            branch.forward = self._inputs.replayed(entry, base, slots.history[slot])
            branch.forward.is_replay = False
        else:
            branch.forward = self._pass_of_values(branch, known.values[span], items, known.states)
        self._report(branch, span, is_dry=feeds is not None and feeds.is_dry_after(slot, count))
        return True

    def take_pass(self, result: StepResult, branch: Branch, forward: ForwardPass) -> None:
        """Move a resident loop past a computed pass. Ends it if its last known id does.

        Raises EngineError if the module did not give a carried port, or if the request's grammar forbids an id.
        """
        slots, slot, loop, count = self._memory.slots, branch.slot, branch.loop_state, forward.tokens
        known = loop.known
        assert known is not None
        ids = known.ids[known.taken : known.taken + count]
        if branch.matcher is not None:
            branch.matcher.take(ids.tolist())
        self.take(slot, ids)
        slots.left[slot] -= count
        slots.next_position[slot] += count
        branch.record(Logged(tokens=count, position=forward.position))
        if self._memory.feeds is not None:
            self._memory.feeds.taken[slot] += count
        if self._memory.loop is not None:
            known.states = self._states_after(forward)
            self._memory.set_loop_values(slot, known.states)
        known.taken += count
        branch.forward = None
        if known.taken == len(known.ids):
            loop.known = None
        last, left = int(ids[-1]), int(slots.left[slot])
        if last in loop.spec.stop_ids or not left:
            reason = "stop" if last in loop.spec.stop_ids else "length"
            self._decode.end_loop(result, branch, last, reason, loop.limit - left)

    def _check(self, ids: np.ndarray) -> None:
        vocab = self._memory.slots.vocab
        if ids.min() < 0 or ids.max() >= vocab:
            raise EngineError(
                f"a known id is outside the vocabulary of node {self._requests.node}",
                f"ids from {ids.min()} to {ids.max()}, vocabulary {vocab}",
                node=self._requests.node,
            )

    def _pass_of_values(
        self, branch: Branch, values: np.ndarray, items: np.ndarray | None, states: dict[str, Tensor]
    ) -> ForwardPass:
        """Return the pass of iterations that carry state. values: int64 [n, width]. It runs whole and alone."""
        assert self._memory.loop is not None
        ports, axes = {KNOWN: torch.from_numpy(values.copy())}, dict[str, int | None]({KNOWN: 0})
        if items is not None:
            assert self._memory.loop.ports.feed is not None
            ports[self._memory.loop.ports.feed], axes[self._memory.loop.ports.feed] = torch.from_numpy(items), 0
        return ForwardPass(
            ports=ports | states,
            axes=axes | dict.fromkeys(states),
            tokens=len(values),
            attend=Attend(),
            position=self._memory.slots.position(branch.slot),
            base=branch.logged,
        )

    def _states_after(self, forward: ForwardPass) -> dict[str, Tensor]:
        """Return the carried values after the last iteration of a pass, [1, ...]."""
        assert self._memory.loop is not None
        outputs, states = forward.outputs, {}
        for into, out in self._memory.loop.ports.states:
            if out not in outputs:
                raise EngineError(
                    f"node {self._requests.node} did not give {out!r} for known iterations",
                    "its loop carries that port",
                    node=self._requests.node,
                )
            states[into] = self._memory.loop.shaped(into, outputs[out].reshape(forward.tokens, -1)[-1])[None]
        return states

    def _report(self, branch: Branch, span: slice, *, is_dry: bool) -> None:
        """Report known iterations with the next step, as those that a step has computed. is_dry: after the last one."""
        job, loop = branch.job, branch.loop_state
        assert job is not None and job.loop is not None and loop.known is not None
        ready, ids = self._requests.ready, loop.known.ids[span]
        count = len(ids)
        keys = np.full(count, int(job.key), dtype=np.int64)
        if ready.loop is not None:
            keys, ids = np.concatenate([ready.loop.keys, keys]), np.concatenate([ready.loop.ids, ids])
        ready.loop = LoopStep(keys=keys, ids=ids)
        ready.ran.append(job.key)  # so that a key may occur several times
        if job.loop.emit:
            iteration = loop.limit - int(self._memory.slots.left[branch.slot])
            for number, values in enumerate(loop.known.values[span]):
                outputs = {port: value for port, value in self._ports(values) if port in job.loop.emit}
                is_last = number == count - 1
                ready.emissions.append(
                    Emission(job=job, iteration=iteration + number, outputs=outputs, is_dry=is_dry and is_last)
                )

    def _ports(self, values: np.ndarray) -> Iterator[tuple[str, Tensor]]:
        """Yield the values of each known port of one iteration. values: int64 [width]."""
        start = 0
        for port, shape in self._shapes.items():
            size = prod(shape)
            yield port, torch.from_numpy(values[start : start + size].copy()).reshape(shape)
            start += size
