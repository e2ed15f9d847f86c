"""Resident loops, which the engine iterates alone: what one starts from and what comes back. Used by WalkState."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mstar_core.graph.compile.compiled import CompiledTask, Kind
from mstar_core.graph.runtime.action_queue import Agenda
from mstar_core.graph.runtime.actions import FireLoop, Iteration, Key, Ref, RunInput, Special
from mstar_core.graph.runtime.frames import PENDING, LoopRun, Pending, Slot
from mstar_core.graph.runtime.live_values import Values
from mstar_core.graph.runtime.run_limits import Terms
from mstar_core.graph.runtime.stopping import Stopping


class Residents:
    """The resident loops of one run on one rank. Owned by WalkState."""

    __slots__ = ("_agenda", "_branches", "_given", "_running", "_stopping", "_values", "_walk")

    def __init__(self, terms: Terms, stopping: Stopping, values: Values, agenda: Agenda) -> None:
        self._walk = terms.share.walk
        self._given = terms.given
        self._branches = terms.branches
        self._stopping = stopping
        self._values = values
        self._agenda = agenda
        self._running: dict[tuple[int, Iteration], Iterable[Ref]] = {}

    def fire(self, run: LoopRun) -> None:
        """Hand a loop to the engine once its starting values are there, or end it when it cannot iterate."""
        loop = run.loop
        if run.asked or PENDING in run.values or PENDING in run.imports:
            return
        task = self._walk.tasks[loop.tasks[0]]
        inputs, complete = self._inputs(run, task)
        branches, start = self._branches[task.index], self._stopping.start_of(run)
        # Without an iteration to run only the engine can tell whether the starting value already is a stop.
        if run.limit == 0 and (start is None or not complete or branches is None):
            run.end = (0, "length" if loop.loop.stop is not None else "done")
            return
        if not complete or branches is None:
            self._take_last(run, {})
            run.end = (0, "done")
            return
        run.asked = True
        for ref in inputs.values():
            self._values.retain(ref)
        path = run.scope.path
        self._running[loop.index, path] = tuple(inputs.values())
        self._agenda.act(FireLoop(loop.index, task.index, path, inputs, branches, run.limit, start))

    def take_end(self, run: LoopRun, reason: str, iterations: int, keys: Mapping[str, Key]) -> None:
        """Note how a loop ended. keys: outputs of its last iteration."""
        inputs = self._running.pop((run.loop.index, run.scope.path))
        if iterations > 0:
            self._take_last(run, keys)
        if reason == "length" and run.loop.loop.stop is None:
            reason = "done"
        run.end = (iterations, reason)
        self._values.release_all(inputs)

    def _inputs(self, run: LoopRun, task: CompiledTask) -> tuple[dict[str, Ref], bool]:
        """What the body starts from, and whether every required port is there."""
        inputs: dict[str, Ref] = {}
        complete = True
        for entry in task.inputs:
            ref: Slot
            match entry.source.kind:
                case Kind.SPECIAL:
                    ref = Special(entry.source.port, 0)
                case Kind.RUN:
                    ref = RunInput(entry.source.port) if entry.source.port in self._given else None
                case Kind.IMPORT:
                    ref = run.imports[int(entry.source.port)]
                case _:
                    ref = run.value_of(entry.source.port)
            if ref is not None and not isinstance(ref, Pending):
                inputs[entry.port] = ref
            else:
                complete = complete and entry.optional
        return inputs, complete

    def _take_last(self, run: LoopRun, keys: Mapping[str, Key]) -> None:
        """Replace starting values by those of the last iteration."""
        loop = run.loop
        for number, variable in enumerate(loop.variables):
            ref = keys.get(variable.out)
            self._values.retain(ref)
            self._values.release(run.values[number])
            run.values[number] = ref
        for number, result in enumerate(loop.results):
            if result.variable is None:
                run.last[number] = keys.get(result.port)
                self._values.retain(keys.get(result.port))
