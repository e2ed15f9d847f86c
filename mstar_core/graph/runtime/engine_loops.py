"""Loops that the engine iterates as one job: their starting values and their results. Used by WalkState."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mstar_core.graph.compile.compiled import CompiledTask, Kind
from mstar_core.graph.runtime.action_queue import ActionQueue
from mstar_core.graph.runtime.actions import FireLoop, Iteration, Key, Ref, RunInput, Special
from mstar_core.graph.runtime.frames import PENDING, LoopRun, Pending, Slot
from mstar_core.graph.runtime.loop_control import LoopControl
from mstar_core.graph.runtime.run_context import RunContext


class EngineLoops:
    """The engine loops of one run on one rank. Owned by WalkState."""

    __slots__ = ("_branches", "_control", "_given", "_queue", "_running", "_walk")

    def __init__(self, context: RunContext, control: LoopControl, queue: ActionQueue) -> None:
        self._walk = context.share.walk
        self._given = context.given
        self._branches = context.branches
        self._control = control
        self._queue = queue
        self._running: dict[tuple[int, Iteration], Iterable[Ref]] = {}

    def fire(self, run: LoopRun) -> None:
        """Hand a loop to the engine once its starting values are known, or end it when it cannot iterate."""
        loop = run.loop
        if run.asked or PENDING in run.values or PENDING in run.imports:
            return
        task = self._walk.tasks[loop.tasks[0]]
        inputs, complete = self._inputs(run, task)
        branches, start = self._branches[task.index], self._control.start_of(run)
        # With a limit of 0 the engine still tests the starting value: only it can tell a stop from the limit.
        if run.limit == 0 and (start is None or not complete or branches is None):
            run.end = (0, "length" if loop.loop.stop is not None else "done")
            return
        if not complete or branches is None:
            self._take_last(run, {})
            run.end = (0, "done")
            return
        run.asked = True
        for ref in inputs.values():
            self._queue.retain(ref)
        path = run.scope.path
        self._running[loop.index, path] = tuple(inputs.values())
        self._queue.act(FireLoop(loop.index, task.index, path, inputs, branches, run.limit, start))

    def take_end(self, run: LoopRun, reason: str, iterations: int, keys: Mapping[str, Key]) -> None:
        """Record the end of a loop. keys: outputs of its last iteration."""
        inputs = self._running.pop((run.loop.index, run.scope.path))
        if iterations > 0:
            self._take_last(run, keys)
        if reason == "length" and run.loop.loop.stop is None and run.loop.loop.over is None:
            reason = "done"
        run.end = (iterations, reason)
        self._queue.release_all(inputs)

    def _inputs(self, run: LoopRun, task: CompiledTask) -> tuple[dict[str, Ref], bool]:
        """Return the starting values of the body, and whether every required port has one."""
        inputs: dict[str, Ref] = {}
        complete = True
        for entry in task.inputs:
            ref: Slot
            match entry.source.kind:
                case Kind.CHUNK:
                    continue  # the stream feeds the engine
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
        """Replace the starting values by those of the last iteration."""
        loop = run.loop
        for number, variable in enumerate(loop.variables):
            ref = keys.get(variable.out)
            self._queue.retain(ref)
            self._queue.release(run.values[number])
            run.values[number] = ref
        for number, result in enumerate(loop.results):
            if result.variable is None:
                run.last[number] = keys.get(result.port)
                self._queue.retain(keys.get(result.port))
