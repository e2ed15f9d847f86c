"""Firings of tasks: counts the inputs that each one waits for and fires it with the last. Used by WalkState."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mstar_core.graph.compile.compiled import CompiledTask, Kind
from mstar_core.graph.runtime.action_queue import Agenda
from mstar_core.graph.runtime.actions import Fire, Hold, Iteration, Key, Ref, RunInput, Special, Want
from mstar_core.graph.runtime.frames import Scope
from mstar_core.graph.runtime.live_values import Values
from mstar_core.graph.runtime.run_limits import Terms


class Firings:
    """The tasks of one run on one rank: those in open scopes that wait, and those that run. Owned by WalkState."""

    __slots__ = ("_agenda", "_branches", "_given", "_running", "_values", "_walk")

    def __init__(self, terms: Terms, values: Values, agenda: Agenda) -> None:
        self._walk = terms.share.walk
        self._given = terms.given
        self._branches = terms.branches
        self._values = values
        self._agenda = agenda
        self._running: dict[tuple[int, Iteration], Iterable[Ref]] = {}

    def prepare(self, scope: Scope, task: CompiledTask) -> None:
        """Fill in what is known already and count what has to come."""
        inputs: dict[str, Ref] = {}
        waiting = 1  # one for the opening itself, so that no task fires twice
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
                self._agenda.act(Want(task.index, self._walk.taps[task.index], scope.path))
        scope.inputs[task.index] = inputs
        scope.waiting[task.index] = waiting

    def give(self, scope: Scope, task: int, number: int, ref: Ref | None) -> None:
        """Note input `number` of a task; to be counted with `count`."""
        entry = self._walk.tasks[task].inputs[number]
        if ref is not None:
            self._values.retain(ref)
            scope.inputs[task][entry.port] = ref
        elif not entry.optional:
            scope.missing.add(task)

    def count(self, scope: Scope, task: int) -> bool:
        """Count one thing less to wait for and fire with the last. Gives whether the task has to be skipped instead."""
        scope.waiting[task] -= 1
        if scope.waiting[task]:
            return False
        branches = self._branches[task]
        if task in scope.missing or branches is None:
            return True
        inputs = scope.inputs.pop(task)
        self._running[task, scope.path] = tuple(inputs.values())
        self._agenda.act(Fire(task, scope.path, inputs, branches))
        return False

    def end(self, task: int, iteration: Iteration) -> Iterable[Ref]:
        """The inputs of a firing that ended, to be released."""
        return self._running.pop((task, iteration))

    def hold(self, task: CompiledTask, keys: Mapping[str, Key]) -> None:
        """Keep outputs that a later loop may start from."""
        for port in task.holds:
            if port in keys:
                self._agenda.act(Hold(task.name, port, keys[port]))
