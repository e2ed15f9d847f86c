"""Candidates of one branch, and the results of the job that they share. Used by `Candidates`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mstar_core.engine.base import Emission, Job
from mstar_core.engine.transfers import gather
from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Done
    from mstar_core.engine.scheduling.sequence import Branch


@dataclass(slots=True, kw_only=True)
class CandidateJob(Job):
    """The share of one candidate in a job of several, `whole`."""

    whole: Job
    group: CandidateGroup
    index: int


@dataclass(slots=True, kw_only=True)
class CandidateGroup:
    """The candidates of one branch, and what they have produced for their job. Owned by that branch.

    takes_turns: nothing of a candidate outlives its share of the job, so each is freed when it ends. is_for_loop: they
    live as long as a loop. job: what they run, None between jobs. entered: how many have a slot.
    last_values: last values of each candidate's carried ports. stacked: outputs of finished candidates, by port, on a
    first axis of all candidates; filled: how many have theirs there. An output is moved, never held twice: one frame of
    each of hundreds of candidates is half a gigabyte.
    """

    parent: Branch
    branches: list[Branch] = field(default_factory=list)
    takes_turns: bool = False
    is_for_loop: bool = False
    job: Job | None = None
    entered: int = 0
    done: dict[int, Done] = field(default_factory=dict)
    last_values: list[dict[str, Tensor]] = field(default_factory=list)
    stacked: dict[str, Tensor] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)
    _iterations: list[deque[dict[str, Tensor]]] = field(default_factory=list)
    _last: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    _emitted: int = 0

    def begin(self, job: Job) -> None:
        """Start the next job."""
        self.job = job
        self.done = {}
        self.stacked, self.filled = {}, {}
        self.last_values = [{} for _ in self.branches]
        self._iterations = [deque() for _ in self.branches]
        self._last = {}
        self._emitted = 0

    def add_iteration(self, index: int, outputs: dict[str, Tensor]) -> None:
        """Note what a candidate emitted in its next iteration."""
        self._iterations[index].append(outputs)

    def emissions(self) -> Iterator[Emission]:
        """Yield the iterations that all candidates have ended. One that stopped earlier repeats its last values."""
        assert self.job is not None
        queues = self._iterations
        while any(queues) and all(queue or index in self.done for index, queue in enumerate(queues)):
            for index, queue in enumerate(queues):
                if queue:
                    self._last[index] = queue.popleft()
            values = [self._last[index] for index in range(len(self.branches)) if index in self._last]
            if len(values) == len(self.branches):
                yield Emission(job=self.job, iteration=self._emitted, outputs=stack_ports(values))
            self._emitted += 1

    def store(self, finished: Sequence[int]) -> None:
        """Move the outputs of finished candidates (ascending) to their places in `stacked`, one copy per run.

        An output of another shape than the first one's stays where it is; `outputs` then raises.
        """
        for port in sorted({port for index in finished for port in self.done[index].outputs}):
            outputs = [
                (index, self.done[index].outputs[port]) for index in finished if port in self.done[index].outputs
            ]
            if port not in self.stacked:
                first = outputs[0][1]
                self.stacked[port] = first.new_empty((len(self.branches), *first.shape))
            whole, start = self.stacked[port], 0
            outputs = [(index, value) for index, value in outputs if value.shape == whole.shape[1:]]
            for end in range(1, len(outputs) + 1):
                if end == len(outputs) or outputs[end][0] != outputs[end - 1][0] + 1:
                    run = outputs[start:end]
                    gather([value for _, value in run], whole[run[0][0] : run[-1][0] + 1])
                    start = end
            for index, _ in outputs:
                del self.done[index].outputs[port]
                self.last_values[index].pop(port, None)
            self.filled[port] = self.filled.get(port, 0) + len(outputs)

    def outputs(self) -> dict[str, Tensor]:
        """Return the stacked outputs, without ports that a candidate lacks. Raises EngineError for unequal shapes."""
        for done in self.done.values():
            for port, value in done.outputs.items():
                raise _unequal_shapes(port, [value.shape, self.stacked[port].shape[1:]])
        return {port: whole for port, whole in self.stacked.items() if self.filled[port] == len(self.branches)}

    @property
    def is_complete(self) -> bool:
        """Whether every candidate has ended."""
        return len(self.done) == len(self.branches)


def stack_ports(values: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the candidates' values by port, without ports that one lacks. Raises EngineError if shapes differ."""
    ports = [port for port in values[0] if all(port in outputs for outputs in values)] if values else []
    stacked = {}
    for port in ports:
        tensors = [outputs[port] for outputs in values]
        if any(tensor.shape != tensors[0].shape for tensor in tensors):
            raise _unequal_shapes(port, [tensor.shape for tensor in tensors])
        stacked[port] = torch.stack(tensors)
    return stacked


def _unequal_shapes(port: str, shapes: Sequence[torch.Size]) -> EngineError:
    different = sorted({str(list(shape)) for shape in shapes})
    return EngineError(f"candidates of one job gave {port!r} in different shapes", ", ".join(different))
