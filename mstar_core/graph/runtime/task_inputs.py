"""Inputs of tasks: counts those that each task waits for and fires the task with the last one. Used by WalkState."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mstar_core.graph.compile.compiled import CompiledTask, Kind
from mstar_core.graph.runtime.action_queue import ActionQueue
from mstar_core.graph.runtime.actions import Fire, Hold, Iteration, Key, Ref, RunInput, Special, Want
from mstar_core.graph.runtime.frames import Scope
from mstar_core.graph.runtime.run_context import RunContext


class TaskInputs:
    """Waiting and running tasks of one run on one rank. Owned by WalkState."""

    __slots__ = ("_branches", "_given", "_queue", "_running", "_walk")

    def __init__(self, context: RunContext, queue: ActionQueue) -> None:
        self._walk = context.share.walk
        self._given = context.given
        self._branches = context.branches
        self._queue = queue
        self._running: dict[tuple[int, Iteration], Iterable[Ref]] = {}

    def prepare(self, scope: Scope, task: CompiledTask) -> None:
        """Fill in the inputs that are known already and count the others."""
        inputs: dict[str, Ref] = {}
        waiting = 1  # released after the scope has opened, so that no task fires twice
        step = scope.path[-1] if scope.path else 0
        for entry in task.inputs:
            kind, _, name = entry.source
            if kind is Kind.SPECIAL:
                inputs[entry.port] = Special(name, step)
            elif kind is not Kind.RUN:
                waiting += 1
            elif name in self._given:
                inputs[entry.port] = RunInput(name)
            elif not entry.optional:
                scope.missing.add(task.index)
            if kind is Kind.CHUNK and entry.source.at == task.index:
                self._queue.act(Want(task.index, self._walk.taps[task.index], scope.path))
        scope.inputs[task.index] = inputs
        scope.waiting[task.index] = waiting

    def give(self, scope: Scope, task: int, number: int, ref: Ref | None) -> None:
        """Set input `number` of a task; the caller counts it with `count`."""
        entry = self._walk.tasks[task].inputs[number]
        if ref is not None:
            self._queue.retain(ref)
            scope.inputs[task][entry.port] = ref
        elif not entry.optional:
            scope.missing.add(task)

    def count(self, scope: Scope, task: int) -> bool:
        """Count one input that came and fire the task with the last. Returns whether to skip the task instead."""
        scope.waiting[task] -= 1
        if scope.waiting[task]:
            return False
        branches = self._branches[task]
        if task in scope.missing or branches is None:
            return True
        inputs = scope.inputs.pop(task)
        self._running[task, scope.path] = tuple(inputs.values())
        self._queue.act(Fire(task, scope.path, inputs, branches))
        return False

    def end(self, task: int, iteration: Iteration) -> Iterable[Ref]:
        """Return the inputs of a task that ended, for the caller to release."""
        return self._running.pop((task, iteration))

    def hold(self, task: CompiledTask, keys: Mapping[str, Key]) -> None:
        """Hold the outputs that a later loop may start from."""
        for port in task.holds:
            if port in keys:
                self._queue.act(Hold(task.name, port, keys[port]))
