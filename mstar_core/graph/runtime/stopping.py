"""Stop rules of loops: which rank tests them, on what, and who hears the verdict. Used by WalkState and its parts."""

from __future__ import annotations

from mstar_core.graph.compile.compiled import CompiledLoop
from mstar_core.graph.runtime.action_queue import Agenda
from mstar_core.graph.runtime.actions import AskStop, Held, Ref, Send
from mstar_core.graph.runtime.addresses import VERDICT
from mstar_core.graph.runtime.frames import LoopRun, Pending
from mstar_core.graph.runtime.run_limits import Terms
from mstar_core.graph.runtime.starts import Starts


class Stopping:
    """The stop rules of one run on one rank. Owned by WalkState."""

    __slots__ = ("_agenda", "_share", "_starts")

    def __init__(self, terms: Terms, starts: Starts, agenda: Agenda) -> None:
        self._share = terms.share
        self._starts = starts
        self._agenda = agenda

    def note(self, run: LoopRun, iteration: int, verdict: str) -> bool:
        """Note the verdict on an iteration, or tell the rank that leads. Gives whether it was noted here."""
        loop = run.loop.index
        if self._share.leads(loop):
            run.verdicts[iteration] = verdict
            return True
        address, path = self._share.walk.address(loop), (*run.scope.path, iteration)
        self._agenda.act(Send(self._share.leaders[loop], address, VERDICT + verdict, path, None))
        return False

    # before the first iteration

    def has_start_test(self, loop: CompiledLoop) -> bool:
        """Whether the first iteration waits for a verdict (named -1) on a starting value."""
        stop = loop.loop.stop
        return stop is not None and (stop.port in loop.loop.carry or self._starts.are_all_held(loop))

    def test_start(self, run: LoopRun, number: int, ref: Ref | None) -> None:
        """Test the starting value of a carried port, if the rule is about that port; an absent one is no stop."""
        stop = run.loop.loop.stop
        if stop is None or run.loop.variables[number].out != stop.port or not self._judges(run):
            return
        if ref is None:
            self.note(run, -1, "keep")
        else:
            self._agenda.act(AskStop(run.loop.index, run.scope.path, ref))

    def test_held(self, run: LoopRun) -> None:
        """Test what a stop port that is not carried last held, if the loop goes on from there."""
        value = self._held_stop(run.loop)
        if value is not None and self._judges(run):
            self._agenda.act(AskStop(run.loop.index, run.scope.path, value))

    def start_of(self, run: LoopRun) -> Ref | None:
        """The value that a resident loop's rule is tested on before its first iteration."""
        stop = run.loop.loop.stop
        if stop is not None and stop.port in run.loop.loop.carry:
            value = run.value_of(run.loop.loop.carry[stop.port])
            return None if isinstance(value, Pending) else value
        return self._held_stop(run.loop)

    def _judges(self, run: LoopRun) -> bool:
        loop = run.loop
        return not loop.resident and run.limit != 0 and self._share.judges[loop.index] == self._share.rank

    def _held_stop(self, loop: CompiledLoop) -> Held | None:
        """The starting value of a stop port that is not carried."""
        stop = loop.loop.stop
        if stop is None or loop.stop_task is None or stop.port in loop.loop.carry:
            return None
        if not self._starts.are_all_held(loop):
            return None
        return Held(self._share.walk.tasks[loop.stop_task].name, stop.port)
