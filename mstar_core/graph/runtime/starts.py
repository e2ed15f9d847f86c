"""What loops start from: the Run's inputs, and what a port last held. Used by WalkState and by its stop rules."""

from __future__ import annotations

from mstar_core.graph.compile.compiled import CompiledLoop, Kind, Source
from mstar_core.graph.runtime.action_queue import Agenda
from mstar_core.graph.runtime.actions import Held, Key, Recall, Ref, RunInput
from mstar_core.graph.runtime.frames import PENDING, LoopRun, Scope, Slot
from mstar_core.graph.runtime.live_values import Values
from mstar_core.graph.runtime.run_limits import Terms


class Starts:
    """Starting values of the loops of one run. Owned by WalkState."""

    __slots__ = ("_agenda", "_given", "_limits", "_share", "_values")

    def __init__(self, terms: Terms, values: Values, agenda: Agenda) -> None:
        self._share = terms.share
        self._limits = terms.limits
        self._given = terms.given
        self._values = values
        self._agenda = agenda

    def new_run(self, scope: Scope, loop: CompiledLoop) -> LoopRun:
        """A run of a loop of which nothing is known yet. Imports that nobody here takes are known to be absent."""
        share = self._share
        owned = [share.owners[loop.index, variable.port] == share.rank for variable in loop.variables]
        imports: list[Slot] = [
            PENDING if Source(Kind.IMPORT, loop.index, str(number)) in share.routes else None
            for number in range(len(loop.imports))
        ]
        return LoopRun(loop, scope, self._limits[loop.index], owned, imports)

    def from_run(self, loop: CompiledLoop, number: int) -> Ref | None:
        """The starting value of a carried port that every rank knows by itself."""
        start = loop.variables[number].start
        return RunInput(start.port) if start.kind is Kind.RUN and start.port in self._given else None

    def recall(self, run: LoopRun, number: int) -> Key:
        """Name the value that a port holds now, which a firing inside the loop may replace before it is used."""
        variable = run.loop.variables[number]
        key = Key(self._share.walk.address(run.loop.index), variable.port, (*run.scope.path, -1))
        self._values.bring_in([key])
        self._agenda.act(Recall(key, *variable.held))
        return key

    def keep_held(self, run: LoopRun) -> None:
        """Results of a resident loop that did not iterate: a later run of it would replace what is held."""
        for number, value in enumerate(run.values):
            if isinstance(value, Held):
                run.values[number] = self.recall(run, number)

    def are_all_held(self, loop: CompiledLoop) -> bool:
        """Whether a loop goes on from where an earlier one left off: its stop port then has a starting value too."""
        starts = [variable.start for variable in loop.variables]
        return bool(starts) and all(s.kind is Kind.RUN and s.port not in self._given for s in starts)
