"""Whether another iteration of a loop follows: the leading rank's decision, and its marks. Used by WalkState."""

from __future__ import annotations

from mstar_core.graph.runtime.action_queue import Agenda
from mstar_core.graph.runtime.actions import Key, Send, Want
from mstar_core.graph.runtime.addresses import END, GO, VERDICT
from mstar_core.graph.runtime.frames import LoopRun, Pending
from mstar_core.graph.runtime.run_limits import Terms
from mstar_core.graph.runtime.stopping import Stopping


class Leading:
    """Decides about loops that this rank leads and follows the marks about the others. Owned by WalkState.

    A decision only moves `allowed` and `end` of the LoopRun; WalkState opens and ends iterations by them.
    """

    __slots__ = ("_agenda", "_share", "_stopping")

    def __init__(self, terms: Terms, stopping: Stopping, agenda: Agenda) -> None:
        self._share = terms.share
        self._stopping = stopping
        self._agenda = agenda

    def decide(self, run: LoopRun) -> None:
        """Decide about the iteration that follows, if this rank leads and everything for that is known."""
        if not self._share.leads(run.loop.index):
            return
        loop, following = run.loop.loop, run.index + 1
        if following == 0 and run.limit != 0 and self._stopping.has_start_test(run.loop) and -1 not in run.verdicts:
            return
        if following > 0 and run.loop.stop_task is not None and run.index not in run.verdicts:
            return
        verdict = run.verdicts.get(run.index, "keep")
        if verdict != "keep":
            self._end(run, following, "stop" if verdict == "stop" else "done")
        elif run.limit is not None and following >= run.limit:
            bounded = loop.stop is not None or loop.over is not None
            self._end(run, following, "length" if bounded else "done")
        elif loop.over is None or self._has_chunk(run, following):
            self._go_on(run, following)
        elif run.stream_ended and not _goes_on_empty(run):
            self._end(run, following, "done")

    def take_mark(self, run: LoopRun, port: str, iteration: int) -> None:
        """A mark from another rank: another iteration, the end, or the stop rule's verdict."""
        if port == GO:
            run.allowed = max(run.allowed, iteration)
        elif port.startswith(END):
            run.allowed = max(run.allowed, iteration - 1)
            run.end = (iteration, port.removeprefix(END))
        else:
            run.verdicts[iteration] = port.removeprefix(VERDICT)

    def take_chunk(self, run: LoopRun, key: Key | None) -> None:
        """The answer to Want. key: the chunk, or None when no more will come."""
        run.asked = False
        if key is None:
            run.stream_ended = True
        else:
            run.chunk = key

    def _go_on(self, run: LoopRun, following: int) -> None:
        run.allowed = following
        run.verdicts.pop(run.index, None)
        self._tell(run, GO, following)

    def _end(self, run: LoopRun, count: int, reason: str) -> None:
        run.end = (count, reason)
        self._tell(run, END + reason, count)

    def _tell(self, run: LoopRun, mark: str, iteration: int) -> None:
        for rank in self._share.followers[run.loop.index]:
            address = self._share.walk.address(run.loop.index)
            self._agenda.act(Send(rank, address, mark, (*run.scope.path, iteration), None))

    def _has_chunk(self, run: LoopRun, following: int) -> bool:
        """Whether the next iteration has its chunk, or the absence of one after the end; asks for it otherwise."""
        if not isinstance(run.chunk, Pending):
            return True
        if run.stream_ended:
            if _goes_on_empty(run):
                run.chunk = None
                return True
            return False
        if not run.asked:
            run.asked = True
            over = run.loop.loop.over
            address = self._share.walk.address(run.loop.index)
            self._agenda.act(Want(address, over.name if over is not None else "", (*run.scope.path, following)))
        return False


def _goes_on_empty(run: LoopRun) -> bool:
    """Whether a loop over a stream that ended iterates on with no chunk."""
    over = run.loop.loop.over
    ends = run.limit is not None or run.loop.loop.stop is not None
    return over is not None and over.chunk.after_end == "empty" and ends
