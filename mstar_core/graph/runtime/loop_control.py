"""Start, continuation and end of loops: starting values, stop rules and the leading rank's decision per iteration.

Used by WalkState, which opens and ends iterations by `allowed` and `end` of a LoopRun.
"""

from __future__ import annotations

from mstar_core.graph.compile.compiled import CompiledLoop, Kind, Source
from mstar_core.graph.runtime.action_queue import ActionQueue
from mstar_core.graph.runtime.actions import AskStop, Held, Key, Recall, Ref, RunInput, Save, Send, Want
from mstar_core.graph.runtime.addresses import END, GO, VERDICT, saved_input
from mstar_core.graph.runtime.frames import PENDING, LoopRun, Pending, Scope, Slot
from mstar_core.graph.runtime.run_context import RunContext


class LoopControl:
    """The loops of one run on one rank. Owned by WalkState.

    Of all ranks in a loop one leads: it decides whether an iteration follows and sends marks to the others. The rank
    of the stop port judges: it tests the stop rule and sends its verdict to the leading rank.
    """

    __slots__ = ("_firsts", "_given", "_limits", "_queue", "_share")

    def __init__(self, context: RunContext, queue: ActionQueue) -> None:
        self._share = context.share
        self._limits = context.limits
        self._given = context.given
        self._firsts = context.firsts
        self._queue = queue

    # starting values

    def new_run(self, scope: Scope, loop: CompiledLoop) -> LoopRun:
        """Return a fresh run of a loop. Imports that no task here takes are known to be absent."""
        share = self._share
        owned = [share.owners[loop.index, variable.port] == share.rank for variable in loop.variables]
        imports: list[Slot] = [
            PENDING if Source(Kind.IMPORT, loop.index, str(number)) in share.fanouts else None
            for number in range(len(loop.imports))
        ]
        return LoopRun(loop, scope, self._limits[loop.index], owned, imports, self._firsts.get(loop.name, 0))

    def from_run(self, loop: CompiledLoop, number: int) -> Ref | None:
        """Return the starting value of a carried port if every rank knows it: an input of the Run, or a saved value."""
        if loop.name in self._firsts:
            return RunInput(saved_input(loop.name, loop.variables[number].port))
        start = loop.variables[number].start
        return RunInput(start.port) if start.kind is Kind.RUN and start.port in self._given else None

    def recall(self, run: LoopRun, number: int) -> Key:
        """Copy the held value of a carried port, which a task inside the loop may replace before it is used."""
        variable = run.loop.variables[number]
        key = Key(self._share.walk.address(run.loop.index), variable.port, (*run.scope.path, -1))
        self._queue.store([key])
        self._queue.act(Recall(key, *variable.held))
        return key

    def keep_held(self, run: LoopRun) -> None:
        """Copy results of an engine loop that did not iterate; a later run of it would replace the held values."""
        for number, value in enumerate(run.values):
            if isinstance(value, Held):
                run.values[number] = self.recall(run, number)

    def save(self, run: LoopRun) -> None:
        """Save the carried values before an iteration that opens, if its time has come and all of them are here."""
        every, following = run.loop.loop.save_every, run.index
        if not every or following == run.first or (following % every and following + 1 != run.limit):
            return
        values = {
            variable.port: value
            for variable, value in zip(run.loop.variables, run.values, strict=True)
            if value is not None and not isinstance(value, Pending)
        }
        if len(values) == len(run.values):
            self._queue.act(Save(run.loop.index, following, values))

    # the stop rule on the starting value

    def start_of(self, run: LoopRun) -> Ref | None:
        """Return the value to test an engine loop's stop rule on before its first iteration."""
        stop = run.loop.loop.stop
        if stop is not None and stop.port in run.loop.loop.carry:
            value = run.value_of(run.loop.loop.carry[stop.port])
            return None if isinstance(value, Pending) else value
        return self._held_stop(run.loop)

    def test_start(self, run: LoopRun, number: int, ref: Ref | None) -> None:
        """Test the starting value of a carried port if it is the stop port. An absent value does not stop."""
        stop = run.loop.loop.stop
        if stop is None or run.loop.variables[number].out != stop.port or not self._judges(run):
            return
        if ref is None:
            self.judge(run, -1, "keep")
        else:
            self._queue.act(AskStop(run.loop.index, run.scope.path, ref))

    def test_held(self, run: LoopRun) -> None:
        """Test the held value of a stop port that is not carried, if the loop goes on from held values."""
        value = self._held_stop(run.loop)
        if value is not None and self._judges(run):
            self._queue.act(AskStop(run.loop.index, run.scope.path, value))

    def _has_start_test(self, loop: CompiledLoop) -> bool:
        """Whether the first iteration waits for a verdict (number -1) on a starting value."""
        stop = loop.loop.stop
        return stop is not None and (stop.port in loop.loop.carry or self._are_all_held(loop))

    def _are_all_held(self, loop: CompiledLoop) -> bool:
        """Whether a loop continues an earlier one; its stop port then has a starting value too."""
        starts = [variable.start for variable in loop.variables]
        return bool(starts) and all(s.kind is Kind.RUN and s.port not in self._given for s in starts)

    def _held_stop(self, loop: CompiledLoop) -> Held | None:
        """Return the starting value of a stop port that is not carried."""
        stop = loop.loop.stop
        if stop is None or loop.stop_task is None or stop.port in loop.loop.carry or not self._are_all_held(loop):
            return None
        return Held(self._share.walk.tasks[loop.stop_task].name, stop.port)

    def _judges(self, run: LoopRun) -> bool:
        loop = run.loop
        return not loop.runs_in_engine and run.limit != 0 and self._share.judges[loop.index] == self._share.rank

    # another iteration, or the end

    def judge(self, run: LoopRun, iteration: int, verdict: str) -> bool:
        """Record the verdict on an iteration, or send it to the leading rank. Returns whether it was recorded here."""
        loop = run.loop.index
        if self._share.leads(loop):
            run.verdicts[iteration] = verdict
            return True
        address, path = self._share.walk.address(loop), (*run.scope.path, iteration)
        self._queue.act(Send(self._share.leaders[loop], address, VERDICT + verdict, path, None))
        return False

    def decide(self, run: LoopRun) -> None:
        """Decide about the next iteration, if this rank leads and everything is known."""
        if not self._share.leads(run.loop.index):
            return
        loop, following = run.loop.loop, run.index + 1
        if following == 0 and run.limit != 0 and self._has_start_test(run.loop) and -1 not in run.verdicts:
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
            run.allowed = following
            run.verdicts.pop(run.index, None)
            self._send_mark(run, GO, following)
        elif run.stream_ended and not _iterates_after_end(run):
            self._end(run, following, "done")

    def take_mark(self, run: LoopRun, port: str, iteration: int) -> None:
        """Apply a mark from another rank: another iteration, the end, or a verdict of the stop rule."""
        if port == GO:
            run.allowed = max(run.allowed, iteration)
        elif port.startswith(END):
            run.allowed = max(run.allowed, iteration - 1)
            run.end = (iteration, port.removeprefix(END))
        else:
            run.verdicts[iteration] = port.removeprefix(VERDICT)

    def take_chunk(self, run: LoopRun, key: Key | None) -> None:
        """Apply the answer to Want. key: the chunk, or None after the end of the stream."""
        run.asked = False
        if key is None:
            run.stream_ended = True
        else:
            run.chunk = key

    def _end(self, run: LoopRun, count: int, reason: str) -> None:
        run.end = (count, reason)
        self._send_mark(run, END + reason, count)

    def _send_mark(self, run: LoopRun, mark: str, iteration: int) -> None:
        for rank in self._share.followers[run.loop.index]:
            address = self._share.walk.address(run.loop.index)
            self._queue.act(Send(rank, address, mark, (*run.scope.path, iteration), None))

    def _has_chunk(self, run: LoopRun, following: int) -> bool:
        """Whether the next iteration has its chunk, or runs without one after the end. Requests it otherwise."""
        if not isinstance(run.chunk, Pending):
            return True
        if run.stream_ended:
            if _iterates_after_end(run):
                run.chunk = None
                return True
            return False
        if not run.asked:
            run.asked = True
            over = run.loop.loop.over
            address = self._share.walk.address(run.loop.index)
            self._queue.act(Want(address, over.name if over is not None else "", (*run.scope.path, following)))
        return False


def _iterates_after_end(run: LoopRun) -> bool:
    """Whether a loop over a stream iterates without a chunk once the stream has ended."""
    over = run.loop.loop.over
    ends = run.limit is not None or run.loop.loop.stop is not None
    return over is not None and over.chunk.after_end == "empty" and ends
