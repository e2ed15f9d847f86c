"""Driver of the engines of one model in place of a worker: submits jobs, runs steps, passes results on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mstar_core.engine.base import Done, Emission, Handle, Job, JobKey, StepResult
from mstar_core.engine.runner import NodeRunner
from mstar_core.graph.declare.sampling import SamplingParams


@dataclass(slots=True)
class EngineDriver:
    """Runs engines in a fixed order. emissions: streamed loop outputs, by job key."""

    runners: dict[str, NodeRunner]
    lookahead: int = 1
    done: dict[int, Done] = field(default_factory=dict)
    emissions: dict[int, list[Emission]] = field(default_factory=dict)
    _flight: dict[str, list[Any]] = field(default_factory=dict)
    _keys: int = 0
    _handles: int = 0
    _then: dict[int, Callable[[Done], None]] = field(default_factory=dict)

    def open(self, max_tokens: int, rows: int = 1) -> Handle:
        """Open a request at every engine."""
        self._handles += 1
        for runner in self.runners.values():
            runner.open(Handle(self._handles), SamplingParams(), max_tokens, rows)
        return Handle(self._handles)

    def submit(
        self,
        node: str,
        handle: Handle,
        inputs: dict[str, Tensor],
        then: Callable[[Done], None] | None = None,
        **fields: Any,
    ) -> int:
        """Queue a job and return its key. then: called with its result before the next step runs."""
        self._keys += 1
        if then is not None:
            self._then[self._keys] = then
        self.runners[node].submit(Job(key=JobKey(self._keys), handle=handle, inputs=inputs, sample=False, **fields))
        return self._keys

    def close(self, handle: Handle) -> None:
        """Close a request at every engine."""
        for runner in self.runners.values():
            runner.close(handle)

    def run(self) -> None:
        """Run steps until no work is left. Raises the first failure."""
        while any([self._turn(name, runner) for name, runner in self.runners.items()]):
            pass

    def capture(self) -> None:
        """Run the idle work of every engine."""
        for runner in self.runners.values():
            while runner.idle():
                pass

    def _turn(self, name: str, runner: NodeRunner) -> bool:
        flight, launched = self._flight.setdefault(name, []), runner.launch()
        if launched is not None:
            flight.append(launched)
        if not flight:
            return False
        if launched is None or len(flight) > self.lookahead:
            self.take(runner.collect(flight.pop(0)))
        return True

    def once(self, node: str) -> None:
        """Run one step of one engine and wait for it."""
        running = self.runners[node].launch()
        assert running is not None, "nothing to do"
        self.take(self.runners[node].collect(running))

    def take(self, result: StepResult) -> None:
        """Store the results of a step and call the callbacks of its jobs. Raises the first failure."""
        for failed in result.failed:
            raise failed.error
        for told in result.emissions:
            self.emissions.setdefault(int(told.job.key), []).append(told)
        for ended in result.done:
            self.done[int(ended.job.key)] = ended
            then = self._then.pop(int(ended.job.key), None)
            if then is not None:
                then(ended)
