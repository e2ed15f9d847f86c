"""Readiness: the state machine of one run of one walk for one request on one rank. Driven by the worker.

Cost model: constant work per event and consumer; no value is touched, only its name. Everything that a rank is sent
is awaited before its share ends, so values that crossed are always taken and freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from mstar_core.graph.actions import (
    Action,
    Actions,
    AskStop,
    Emit,
    EndWalk,
    Fire,
    FireLoop,
    Free,
    Held,
    Hold,
    Iteration,
    Key,
    Recall,
    Ref,
    RunInput,
    Send,
    Special,
    ToStream,
    Want,
)
from mstar_core.graph.compiled import ROOT, CompiledLoop, CompiledTask, Kind, Outlet, Source
from mstar_core.graph.cut import RankWalk, Route
from mstar_core.graph.frames import PENDING, LoopRun, Pending, Scope
from mstar_core.graph.nodes import MAIN
from mstar_core.graph.terms import MaxIters, branches_of, loop_limits

GO: Final = "$go"
END: Final = "$end:"
NOWHERE: Final = Route()


class WalkState:
    """One run of one walk on one rank. Owned by the worker; every method answers with what to do next, in order.

    max_iters, given (names of the Run's inputs) and branches are the Run's and equal on all ranks.
    """

    def __init__(
        self,
        share: RankWalk,
        max_iters: MaxIters = None,
        given: Collection[str] = (),
        branches: Iterable[str] = (MAIN,),
    ) -> None:
        self.share = share
        self.walk = share.walk
        self.limits = loop_limits(share.walk, max_iters)
        self.given = frozenset(given)
        self.branches = branches_of(share.walk, tuple(branches))
        self.ended = False
        self._reason = "done"
        self._counts: dict[str, int] = {}
        self._scopes: dict[tuple[int, Iteration], Scope] = {}
        self._early: dict[tuple[int, Iteration], list[tuple[int, str, Iteration, bool]]] = {}
        self._running: dict[tuple[int, Iteration], Sequence[Ref]] = {}
        self._refs: dict[Key, int] = {}
        self._out: Actions = []
        self._queue: deque[Callable[[], None]] = deque()

    @property
    def alive(self) -> int:
        """Number of values that the caller still stores for this run."""
        return len(self._refs)

    # events

    def start(self) -> Actions:
        """Begin. Called once, before any other event."""
        self._later(lambda: self._open(ROOT, (), None))
        return self._settle()

    def done(self, task: int, iteration: Iteration, ports: Collection[str], stop: bool | None = None) -> Actions:
        """A fired task ended. ports: outputs it produced. stop: what the loop's stop rule said, if it has one."""
        keys = {port: Key(task, port, iteration) for port in ports}
        if self.ended:
            return [Free(key) for key in keys.values()]
        scope = self._scopes[self.walk.tasks[task].frame, iteration]
        inputs = self._running.pop((task, iteration))
        self._bring_in(keys.values())
        self._finish_task(scope, task, keys, "stop" if stop else "keep")
        self._release_all([*inputs, *keys.values()])
        return self._settle()

    def resident_done(
        self, loop: int, iteration: Iteration, reason: str, iterations: int, ports: Collection[str]
    ) -> Actions:
        """A resident loop ended. ports: outputs of its last iteration, named (task, port, iteration + (last,))."""
        task = self.walk.loops[loop].tasks[0]
        keys = {port: Key(task, port, (*iteration, iterations - 1)) for port in ports}
        if self.ended:
            return [Free(key) for key in keys.values()]
        run = self._loop_run(loop, iteration)
        inputs = self._running.pop((self.walk.address(loop), iteration))
        self._bring_in(keys.values())
        self._hold(task, keys)
        if iterations > 0:
            self._take_last(run, keys)
        if reason == "length" and run.loop.loop.stop is None:
            reason = "done"
        run.end = (iterations, reason)
        self._release_all([*inputs, *keys.values()])
        self._later(lambda: self._advance(run))
        return self._settle()

    def tested(self, loop: int, iteration: Iteration, stop: bool) -> Actions:
        """Answer to AskStop."""
        if not self.ended:
            self._judge(self._loop_run(loop, iteration), -1, "stop" if stop else "keep")
        return self._settle()

    def chunk(self, address: int, iteration: Iteration) -> Actions:
        """Answer to Want: the chunk is there, stored under Key(address, "$chunk", iteration)."""
        key = Key(address, "$chunk", iteration)
        if self.ended:
            return [Free(key)]
        self._bring_in([key])
        self._chunk_came(address, iteration, key)
        return self._settle()

    def stream_ended(self, address: int, iteration: Iteration) -> Actions:
        """Answer to Want: no chunk will come any more."""
        if not self.ended:
            self._chunk_came(address, iteration, None)
        return self._settle()

    def arrived(self, address: int, port: str, iteration: Iteration, present: bool) -> Actions:
        """What another rank sent. present: whether a value came along."""
        if self.ended:
            return [Free(Key(address, port, iteration))] if present else []
        if present:
            self._bring_in([Key(address, port, iteration)])
        place = self._place(address, port, iteration)
        scope = self._scopes.get(place)
        if scope is None:
            self._early.setdefault(place, []).append((address, port, iteration, present))
        else:
            self._take_in(scope, address, port, iteration, present)
        return self._settle()

    def cancel(self) -> Actions:
        """Give up, at any time. What is still running answers as usual and is freed at once."""
        if self.ended:
            return []
        self._queue.clear()
        self._end_walk("cancelled")
        return self._settle()

    # the queue: no recursion, so that long chains of skipped parts cannot overflow the stack

    def _later(self, step: Callable[[], None]) -> None:
        self._queue.append(step)

    def _settle(self) -> Actions:
        while self._queue:
            self._queue.popleft()()
        out, self._out = self._out, []
        return out

    def _act(self, action: Action) -> None:
        self._out.append(action)

    # values

    def _bring_in(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._refs[key] = 1

    def _retain(self, ref: Ref | None) -> None:
        if isinstance(ref, Key):
            self._refs[ref] += 1

    def _release(self, ref: Ref | Pending | None) -> None:
        if isinstance(ref, Key):
            self._refs[ref] -= 1
            if not self._refs[ref]:
                del self._refs[ref]
                self._act(Free(ref))

    def _release_all(self, refs: Iterable[Ref | Pending | None]) -> None:
        for ref in refs:
            self._release(ref)

    # scopes

    def _open(self, frame: int, path: Iteration, run: LoopRun | None) -> None:
        """Open a frame: its tasks wait for inputs, its loops are set up."""
        scope = Scope(frame, path, run)
        self._scopes[frame, path] = scope
        tasks, loops = self.share.frame_tasks[frame], self.share.frame_loops[frame]
        scope.pending = len(tasks) + len(loops) + 1
        for task in tasks:
            self._prepare(scope, self.walk.tasks[task])
        for loop in loops:
            scope.loops[loop] = self._new_run(scope, self.walk.loops[loop])
        if run is not None:
            run.inner = scope
            self._enter_loop(scope, run)
        for address, port, iteration, present in self._early.pop((frame, path), ()):
            self._take_in(scope, address, port, iteration, present)
        for task in tasks:
            self._ready_if_complete(scope, task)
        for loop in loops:
            self._begin_loop(scope.loops[loop])
        self._later(lambda: self._finish_part(scope))

    def _prepare(self, scope: Scope, task: CompiledTask) -> None:
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
            elif name in self.given:
                inputs[entry.port] = RunInput(name)
            elif not entry.optional:
                scope.missing.add(task.index)
            if kind is Kind.CHUNK and entry.source.at == task.index:
                self._act(Want(task.index, self.walk.taps[task.index], scope.path))
        scope.inputs[task.index] = inputs
        scope.waiting[task.index] = waiting

    def _finish_part(self, scope: Scope) -> None:
        """One part of a scope is over; with the last one the scope closes."""
        scope.pending -= 1
        if scope.pending:
            return
        del self._scopes[scope.frame, scope.path]
        run = scope.run
        if run is None:
            self._end_walk(self._reason)
        else:
            run.inner = None
            self._later(lambda: self._advance(run))

    def _end_walk(self, reason: str) -> None:
        self.ended = True
        for key in self._refs:
            self._act(Free(key))
        self._refs.clear()
        self._scopes.clear()
        self._early.clear()
        self._running.clear()
        self._act(EndWalk(reason, dict(self._counts)))

    # moving values

    def _deliver(self, scope: Scope, source: Source, ref: Ref | None, send: bool = True) -> None:
        """Hand a value, or its absence, to everybody who takes it from this source."""
        route = self.share.routes.get(source, NOWHERE)
        for what, index, number in route.uses:
            match what:
                case "task":
                    self._give_task(scope, index, number, ref)
                case "import":
                    self._give_import(scope.loops[index], number, ref)
                case "start":
                    self._give_start(scope.loops[index], number, ref)
                case "back":
                    self._retain(ref)
                    _loop_of(scope).values[number] = ref
                case _:
                    run = _loop_of(scope)
                    self._retain(ref)
                    self._release(run.last[number])
                    run.last[number] = ref
        if send:
            address, port = self._address(source)
            for rank in route.ranks:
                self._act(Send(rank, address, port, scope.path, ref))

    def _address(self, source: Source) -> tuple[int, str]:
        if source.kind is Kind.LOOP:
            return self.walk.address(source.at), "=" + source.port
        if source.kind is Kind.VAR:
            return self.walk.address(source.at), source.port
        return source.at, source.port

    def _place(self, address: int, port: str, iteration: Iteration) -> tuple[int, Iteration]:
        """The scope that something sent belongs to."""
        tasks = len(self.walk.tasks)
        if address < tasks:
            return self.walk.tasks[address].frame, iteration
        loop = address - tasks
        if port.startswith("$"):
            return self.walk.loops[loop].parent, iteration[:-1]
        return (self.walk.loops[loop].parent if port.startswith("=") else loop), iteration

    def _take_in(self, scope: Scope, address: int, port: str, iteration: Iteration, present: bool) -> None:
        tasks = len(self.walk.tasks)
        if port.startswith("$"):
            self._mark(scope.loops[address - tasks], port, iteration[-1])
            return
        if address < tasks:
            source = Source(Kind.TASK, address, port)
        elif port.startswith("="):
            source = Source(Kind.LOOP, address - tasks, port[1:])
        else:
            source = Source(Kind.VAR, address - tasks, port)
        key = Key(address, port, iteration) if present else None
        self._deliver(scope, source, key, send=False)
        self._release(key)

    def _give_task(self, scope: Scope, task: int, number: int, ref: Ref | None) -> None:
        entry = self.walk.tasks[task].inputs[number]
        if ref is not None:
            self._retain(ref)
            scope.inputs[task][entry.port] = ref
        elif not entry.optional:
            scope.missing.add(task)
        self._ready_if_complete(scope, task)

    def _give_import(self, run: LoopRun, number: int, ref: Ref | None) -> None:
        self._retain(ref)
        run.imports[number] = ref
        if run.inner is not None:
            self._deliver(run.inner, Source(Kind.IMPORT, run.loop.index, str(number)), ref)
        self._later(lambda: self._advance(run))

    def _give_start(self, run: LoopRun, number: int, ref: Ref | None) -> None:
        if run.inner is not None and run.index == 0:
            scope = run.inner
            self._deliver(scope, Source(Kind.VAR, run.loop.index, run.loop.variables[number].port), ref)
            self._later(lambda: self._finish_part(scope))
        else:
            self._retain(ref)
            run.values[number] = ref
        self._test_start(run, number, ref)
        self._later(lambda: self._advance(run))

    def _let_out(self, outlets: Sequence[Outlet], port: str, ref: Ref, iteration: Iteration) -> None:
        for outlet in outlets:
            if outlet.port == port:
                if outlet.stream is not None:
                    self._act(ToStream(ref, outlet.stream, iteration))
                else:
                    self._act(Emit(ref, port, outlet.modality, iteration))

    # tasks

    def _ready_if_complete(self, scope: Scope, task: int) -> None:
        scope.waiting[task] -= 1
        if scope.waiting[task]:
            return
        inputs = scope.inputs.pop(task)
        branches = self.branches[task]
        if task in scope.missing or branches is None:
            self._later(lambda: self._skip(scope, task, inputs))
            return
        self._running[task, scope.path] = tuple(inputs.values())
        self._act(Fire(task, scope.path, inputs, branches))

    def _skip(self, scope: Scope, task: int, inputs: Mapping[str, Ref]) -> None:
        self._finish_task(scope, task, {}, "skip")
        self._release_all(inputs.values())

    def _finish_task(self, scope: Scope, task: int, keys: Mapping[str, Key], verdict: str) -> None:
        self._hold(task, keys)
        for port, key in keys.items():
            self._let_out(self.walk.tasks[task].outlets, port, key, scope.path)
        for port in self.walk.tasks[task].wanted:
            self._deliver(scope, Source(Kind.TASK, task, port), keys.get(port))
        run = scope.run
        if run is not None and run.loop.stop_task == task:
            self._judge(run, scope.path[-1], verdict)
        self._later(lambda: self._finish_part(scope))

    def _hold(self, task: int, keys: Mapping[str, Key]) -> None:
        for port in self.walk.tasks[task].holds:
            if port in keys:
                self._act(Hold(self.walk.tasks[task].name, port, keys[port]))

    # loops

    def _loop_run(self, loop: int, outer: Iteration) -> LoopRun:
        return self._scopes[self.walk.loops[loop].parent, outer].loops[loop]

    def _new_run(self, scope: Scope, loop: CompiledLoop) -> LoopRun:
        owned = [self.share.owners[loop.index, variable.port] == self.share.rank for variable in loop.variables]
        imports: list[Ref | Pending | None] = [
            PENDING if self._uses_import(loop.index, number) else None for number in range(len(loop.imports))
        ]
        return LoopRun(loop, scope, self.limits[loop.index], owned, imports)

    def _uses_import(self, loop: int, number: int) -> bool:
        return Source(Kind.IMPORT, loop, str(number)) in self.share.routes

    def _from_run(self, loop: CompiledLoop, number: int) -> Ref | None:
        """The starting value of a carried port that every rank knows by itself."""
        start = loop.variables[number].start
        return RunInput(start.port) if start.kind is Kind.RUN and start.port in self.given else None

    def _begin_loop(self, run: LoopRun) -> None:
        """Give a loop the starting values that do not come from the walk itself."""
        for number, variable in enumerate(run.loop.variables):
            if run.owned[number] and variable.start.kind is Kind.RUN:
                known = self._from_run(run.loop, number)
                recalled = self._recall(run, number) if known is None and not run.loop.resident else None
                self._give_start(run, number, known or recalled or Held(*variable.held))
                self._release(recalled)
        self._test_held(run)
        self._later(lambda: self._advance(run))

    def _recall(self, run: LoopRun, number: int) -> Key:
        """Name the value that a port holds now, which a firing inside the loop may replace before it is used."""
        variable = run.loop.variables[number]
        key = Key(self.walk.address(run.loop.index), variable.port, (*run.scope.path, -1))
        self._bring_in([key])
        self._act(Recall(key, *variable.held))
        return key

    def _keep_held(self, run: LoopRun) -> None:
        """Results of a resident loop that did not iterate: a later run of it would replace what is held."""
        for number, value in enumerate(run.values):
            if isinstance(value, Held):
                run.values[number] = self._recall(run, number)

    def _enter_loop(self, scope: Scope, run: LoopRun) -> None:
        """Bring carried values, imports and the chunk into a new iteration."""
        loop, first = run.loop, run.index == 0
        for number, variable in enumerate(loop.variables):
            source = Source(Kind.VAR, loop.index, variable.port)
            known = self._from_run(loop, number) if first else None
            if not run.owned[number]:
                if known is not None:
                    self._deliver(scope, source, known, send=False)
                continue
            value = run.values[number]
            if isinstance(value, Pending):
                scope.pending += 1
                continue
            run.values[number] = PENDING
            self._deliver(scope, source, value, send=known is None)
            self._release(value)
        for number, value in enumerate(run.imports):
            if not isinstance(value, Pending):
                self._deliver(scope, Source(Kind.IMPORT, loop.index, str(number)), value)
        if loop.tap is not None and self.share.leads(loop.index):
            chunk, run.chunk = run.chunk, PENDING
            if not isinstance(chunk, Pending):
                self._deliver(scope, self._chunk_source(loop), chunk)
                self._release(chunk)

    def _chunk_source(self, loop: CompiledLoop) -> Source:
        over = loop.loop.over
        return Source(Kind.CHUNK, self.walk.address(loop.index), over.into[1] if over is not None else "")

    def _advance(self, run: LoopRun) -> None:
        """Open the next iteration of a loop, or end it, as soon as everything for that is known."""
        if run.over or run.inner is not None or self.ended:
            return
        if run.end is None:
            if run.loop.resident:
                self._fire_resident(run)
            elif self.share.leads(run.loop.index):
                self._lead(run)
        following = run.index + 1
        if run.end is not None and (run.loop.resident or following >= run.end[0]):
            self._end_loop(run)
        elif following <= run.allowed and not run.loop.resident:
            run.index = following
            self._open(run.loop.index, (*run.scope.path, following), run)

    def _lead(self, run: LoopRun) -> None:
        """The leading rank's decision about the iteration that follows."""
        following = run.index + 1
        if following == 0 and run.limit != 0 and self._has_start_test(run.loop) and -1 not in run.verdicts:
            return
        if following > 0 and run.loop.stop_task is not None and run.index not in run.verdicts:
            return
        verdict = run.verdicts.get(run.index, "keep")
        if verdict != "keep":
            self._decide(run, following, "stop" if verdict == "stop" else "done")
        elif run.limit is not None and following >= run.limit:
            bounded = run.loop.loop.stop is not None or run.loop.loop.over is not None
            self._decide(run, following, "length" if bounded else "done")
        elif run.loop.loop.over is None or self._has_chunk(run, following):
            self._decide(run, following, None)
        elif run.stream_ended and not self._goes_on_empty(run):
            self._decide(run, following, "done")

    def _decide(self, run: LoopRun, following: int, reason: str | None) -> None:
        """Open iteration `following` (reason None) or end the loop before it; tell the other ranks."""
        if reason is None:
            run.allowed = following
            run.verdicts.pop(run.index, None)
        else:
            run.end = (following, reason)
        port = GO if reason is None else END + reason
        for rank in self.share.followers[run.loop.index]:
            self._act(Send(rank, self.walk.address(run.loop.index), port, (*run.scope.path, following), None))

    def _mark(self, run: LoopRun, port: str, iteration: int) -> None:
        """A loop's mark from another rank: another iteration, the end, or the stop rule's verdict."""
        if port == GO:
            run.allowed = max(run.allowed, iteration)
        elif port.startswith(END):
            run.allowed = max(run.allowed, iteration - 1)
            run.end = (iteration, port.removeprefix(END))
        else:
            run.verdicts[iteration] = port[1:]
        self._later(lambda: self._advance(run))

    def _end_loop(self, run: LoopRun) -> None:
        """Hand out the results of a loop once nothing that was sent to it is on its way."""
        values = [value for value, owned in zip(run.values, run.owned, strict=True) if owned]
        if run.end is None or any(isinstance(value, Pending) for value in (*values, *run.imports)):
            return
        run.over = True
        if run.loop.results:
            self._keep_held(run)
        values = [value for value, owned in zip(run.values, run.owned, strict=True) if owned]
        loop, scope, (count, reason) = run.loop, run.scope, run.end
        if self.share.leads(loop.index):
            self._counts[loop.name] = self._counts.get(loop.name, 0) + count
        if not loop.path and reason != "done":
            self._reason = reason
        for number, result in enumerate(loop.results):
            if self.share.owners[loop.index, "=" + result.port] == self.share.rank:
                ref = run.result(number)
                if ref is not None:
                    self._let_out(result.outlets, result.port, ref, scope.path)
                self._deliver(scope, Source(Kind.LOOP, loop.index, result.port), ref)
        self._release_all([*values, *run.imports, *run.last, run.chunk])
        self._later(lambda: self._finish_part(scope))

    # stop rules

    def _has_start_test(self, loop: CompiledLoop) -> bool:
        stop = loop.loop.stop
        return stop is not None and (stop.port in loop.loop.carry or self._all_held(loop))

    def _all_held(self, loop: CompiledLoop) -> bool:
        """Whether a loop goes on from where an earlier one left off: its stop port then has a starting value too."""
        starts = [variable.start for variable in loop.variables]
        return bool(starts) and all(s.kind is Kind.RUN and s.port not in self.given for s in starts)

    def _judges(self, run: LoopRun) -> bool:
        loop = run.loop
        return not loop.resident and run.limit != 0 and self.share.judges[loop.index] == self.share.rank

    def _test_start(self, run: LoopRun, number: int, ref: Ref | None) -> None:
        stop = run.loop.loop.stop
        if stop is None or run.loop.variables[number].out != stop.port or not self._judges(run):
            return
        if ref is None:
            self._judge(run, -1, "keep")
        else:
            self._act(AskStop(run.loop.index, run.scope.path, ref))

    def _test_held(self, run: LoopRun) -> None:
        value = self._held_stop(run.loop)
        if value is not None and self._judges(run):
            self._act(AskStop(run.loop.index, run.scope.path, value))

    def _held_stop(self, loop: CompiledLoop) -> Held | None:
        """The starting value of a stop port that is not carried."""
        stop = loop.loop.stop
        if stop is None or loop.stop_task is None or stop.port in loop.loop.carry or not self._all_held(loop):
            return None
        return Held(self.walk.tasks[loop.stop_task].name, stop.port)

    def _judge(self, run: LoopRun, iteration: int, verdict: str) -> None:
        """Note the stop rule's verdict on an iteration, or tell the rank that leads."""
        if self.share.leads(run.loop.index):
            run.verdicts[iteration] = verdict
            self._later(lambda: self._advance(run))
        else:
            path = (*run.scope.path, iteration)
            leader = self.share.leaders[run.loop.index]
            self._act(Send(leader, self.walk.address(run.loop.index), "$" + verdict, path, None))

    # streams

    def _has_chunk(self, run: LoopRun, following: int) -> bool:
        """Whether the next iteration has its chunk, or the absence of one after the end; asks for it otherwise."""
        if not isinstance(run.chunk, Pending):
            return True
        if run.stream_ended:
            if self._goes_on_empty(run):
                run.chunk = None
                return True
            return False
        if not run.asked:
            run.asked = True
            over = run.loop.loop.over
            address = self.walk.address(run.loop.index)
            self._act(Want(address, over.name if over is not None else "", (*run.scope.path, following)))
        return False

    def _goes_on_empty(self, run: LoopRun) -> bool:
        over = run.loop.loop.over
        ends = run.limit is not None or run.loop.loop.stop is not None
        return over is not None and over.chunk.after_end == "empty" and ends

    def _chunk_came(self, address: int, iteration: Iteration, key: Key | None) -> None:
        tasks = len(self.walk.tasks)
        if address < tasks:
            task = self.walk.tasks[address]
            scope = self._scopes[task.frame, iteration]
            source = next(e.source for e in task.inputs if e.source.kind is Kind.CHUNK and e.source.at == address)
            self._deliver(scope, source, key)
            self._release(key)
            return
        run = self._loop_run(address - tasks, iteration[:-1])
        run.asked = False
        if key is None:
            run.stream_ended = True
        else:
            run.chunk = key
        self._later(lambda: self._advance(run))

    # resident loops

    def _fire_resident(self, run: LoopRun) -> None:
        """Hand a resident loop to the engine once its starting values are there."""
        loop = run.loop
        if run.asked or any(isinstance(value, Pending) for value in (*run.values, *run.imports)):
            return
        if run.limit == 0:
            run.end = (0, "length" if loop.loop.stop is not None else "done")
            return
        task = self.walk.tasks[loop.tasks[0]]
        inputs, complete = self._resident_inputs(run, task)
        branches = self.branches[task.index]
        if not complete or branches is None:
            self._take_last(run, {})
            run.end = (0, "done")
            return
        run.asked = True
        for ref in inputs.values():
            self._retain(ref)
        self._running[self.walk.address(loop.index), run.scope.path] = tuple(inputs.values())
        self._act(FireLoop(loop.index, task.index, run.scope.path, inputs, branches, run.limit, self._stop_start(run)))

    def _resident_inputs(self, run: LoopRun, task: CompiledTask) -> tuple[dict[str, Ref], bool]:
        """What the body starts from, and whether every required port is there."""
        inputs: dict[str, Ref] = {}
        complete = True
        for entry in task.inputs:
            ref: Ref | Pending | None
            match entry.source.kind:
                case Kind.SPECIAL:
                    ref = Special(entry.source.port, 0)
                case Kind.RUN:
                    ref = RunInput(entry.source.port) if entry.source.port in self.given else None
                case Kind.IMPORT:
                    ref = run.imports[int(entry.source.port)]
                case _:
                    ref = run.value_of(entry.source.port)
            if ref is not None and not isinstance(ref, Pending):
                inputs[entry.port] = ref
            else:
                complete = complete and entry.optional
        return inputs, complete

    def _stop_start(self, run: LoopRun) -> Ref | None:
        stop = run.loop.loop.stop
        if stop is not None and stop.port in run.loop.loop.carry:
            value = run.value_of(run.loop.loop.carry[stop.port])
            return None if isinstance(value, Pending) else value
        return self._held_stop(run.loop)

    def _take_last(self, run: LoopRun, keys: Mapping[str, Key]) -> None:
        """Replace starting values by those of the last iteration."""
        loop = run.loop
        for number, variable in enumerate(loop.variables):
            ref = keys.get(variable.out)
            self._retain(ref)
            self._release(run.values[number])
            run.values[number] = ref
        for number, result in enumerate(loop.results):
            if result.variable is None:
                run.last[number] = keys.get(result.port)
                self._retain(keys.get(result.port))


def _loop_of(scope: Scope) -> LoopRun:
    assert scope.run is not None, "only a loop's body has a way back"
    return scope.run
