"""State machine of one run of one walk for one request on one rank. Driven by the worker.

Cost model: constant work per event and consumer; it moves names of values, never values. A share ends only when
everything that other ranks send to it has arrived, so values that cross ranks are always taken and freed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from mstar_core.graph.compile.compiled import ROOT, CompiledLoop, Kind, Outlet, Source
from mstar_core.graph.compile.cut import Fanout, RankWalk
from mstar_core.graph.declare.nodes import MAIN
from mstar_core.graph.runtime.action_queue import ActionQueue
from mstar_core.graph.runtime.actions import Actions, Emit, EndWalk, Free, Held, Iteration, Key, Ref, Send, ToStream
from mstar_core.graph.runtime.addresses import address_of, scope_of, source_at
from mstar_core.graph.runtime.engine_loops import EngineLoops
from mstar_core.graph.runtime.frames import PENDING, LoopRun, Pending, Scope
from mstar_core.graph.runtime.loop_control import LoopControl
from mstar_core.graph.runtime.run_context import MaxIters, RunContext, branches_of, first_iterations, loop_limits
from mstar_core.graph.runtime.task_inputs import TaskInputs

NOWHERE: Final = Fanout()
NO_FIRSTS: Final[Mapping[str, int]] = MappingProxyType({})


class WalkState:
    """One run of one walk on one rank. Owned by the worker; every event returns the actions that follow, in order.

    max_iters, given (names of the Run's inputs), branches and firsts are the Run's and equal on all ranks. firsts: the
    iterations that loops begin with, by name; the inputs named by `saved_input` are their starting values. WalkState
    moves values and opens and closes scopes; its parts decide about the inputs of tasks and the iterations of loops.
    """

    def __init__(
        self,
        share: RankWalk,
        max_iters: MaxIters = None,
        given: Collection[str] = (),
        branches: Iterable[str] = (MAIN,),
        firsts: Mapping[str, int] = NO_FIRSTS,
    ) -> None:
        self.share = share
        self.walk = share.walk
        self.limits = loop_limits(share.walk, max_iters)
        self.given = frozenset(given)
        self.branches = branches_of(share.walk, tuple(branches))
        self.ended = False
        begins = first_iterations(share.walk, self.limits, firsts)
        context = RunContext(share, self.limits, self.given, self.branches, begins)
        self._queue = ActionQueue()
        self._tasks = TaskInputs(context, self._queue)
        self._control = LoopControl(context, self._queue)
        self._engine_loops = EngineLoops(context, self._control, self._queue)
        self._reason = "done"
        self._counts: dict[str, int] = {}
        self._scopes: dict[tuple[int, Iteration], Scope] = {}
        self._early: dict[tuple[int, Iteration], list[tuple[int, str, Iteration, bool]]] = {}

    @property
    def alive(self) -> int:
        """Number of values that the caller still stores for this run."""
        return self._queue.stored

    # events

    def start(self) -> Actions:
        """Begin. Called once, before any other event."""
        self._queue.later(self._open, ROOT, (), None)
        return self._queue.settle()

    def done(self, task: int, iteration: Iteration, ports: Collection[str], stop: bool | None = None) -> Actions:
        """Take the end of a fired task. ports: its outputs. stop: verdict of the loop's stop rule, if it has one."""
        keys = {port: Key(task, port, iteration) for port in ports}
        if self.ended:
            return [Free(key) for key in keys.values()]
        scope = self._scopes[self.walk.tasks[task].frame, iteration]
        inputs = self._tasks.end(task, iteration)
        self._queue.store(keys.values())
        self._finish_task(scope, task, keys, "stop" if stop else "keep")
        self._queue.release_all([*inputs, *keys.values()])
        return self._queue.settle()

    def loop_done(
        self, loop: int, iteration: Iteration, reason: str, iterations: int, ports: Collection[str]
    ) -> Actions:
        """Take the end of an engine loop. ports: last outputs, stored under (task, port, iteration + (last,))."""
        task = self.walk.loops[loop].tasks[0]
        keys = {port: Key(task, port, (*iteration, iterations - 1)) for port in ports}
        if self.ended:
            return [Free(key) for key in keys.values()]
        run = self._loop_run(loop, iteration)
        self._queue.store(keys.values())
        self._tasks.hold(self.walk.tasks[task], keys)
        self._engine_loops.take_end(run, reason, iterations, keys)
        self._queue.release_all(keys.values())
        self._queue.later(self._advance, run)
        return self._queue.settle()

    def tested(self, loop: int, iteration: Iteration, stop: bool) -> Actions:
        """Take the answer to AskStop."""
        if not self.ended:
            self._judge(self._loop_run(loop, iteration), -1, "stop" if stop else "keep")
        return self._queue.settle()

    def chunk(self, address: int, iteration: Iteration) -> Actions:
        """Take the chunk of a Want, stored under Key(address, "$chunk", iteration)."""
        key = Key(address, "$chunk", iteration)
        if self.ended:
            return [Free(key)]
        self._queue.store([key])
        self._take_chunk(address, iteration, key)
        return self._queue.settle()

    def stream_ended(self, address: int, iteration: Iteration) -> Actions:
        """Take the end of the stream of a Want."""
        if not self.ended:
            self._take_chunk(address, iteration, None)
        return self._queue.settle()

    def arrived(self, address: int, port: str, iteration: Iteration, present: bool) -> Actions:
        """Take a message from another rank. present: whether it carries a value."""
        if self.ended:
            return [Free(Key(address, port, iteration))] if present else []
        if present:
            self._queue.store([Key(address, port, iteration)])
        place = scope_of(self.walk, address, port, iteration)
        scope = self._scopes.get(place)
        if scope is None:
            self._early.setdefault(place, []).append((address, port, iteration, present))
        else:
            self._accept(scope, address, port, iteration, present)
        return self._queue.settle()

    def cancel(self) -> Actions:
        """End the run at any time. Outputs of tasks that still run are freed as soon as they come."""
        if self.ended:
            return []
        self._queue.drop_steps()
        self._end_walk("cancelled")
        return self._queue.settle()

    # scopes

    def _open(self, frame: int, path: Iteration, run: LoopRun | None) -> None:
        """Open a frame: its tasks wait for inputs, its loops are set up."""
        scope = Scope(frame, path, run)
        self._scopes[frame, path] = scope
        tasks, loops = self.share.frame_tasks[frame], self.share.frame_loops[frame]
        scope.pending = len(tasks) + len(loops) + 1
        for task in tasks:
            self._tasks.prepare(scope, self.walk.tasks[task])
        for loop in loops:
            scope.loops[loop] = self._control.new_run(scope, self.walk.loops[loop])
        if run is not None:
            run.inner = scope
            self._enter_loop(scope, run)
        for address, port, iteration, present in self._early.pop((frame, path), ()):
            self._accept(scope, address, port, iteration, present)
        for task in tasks:
            self._count(scope, task)
        for loop in loops:
            self._begin_loop(scope.loops[loop])
        self._queue.later(self._finish_part, scope)

    def _finish_part(self, scope: Scope) -> None:
        """Count one part of a scope as finished; the scope closes with the last one."""
        scope.pending -= 1
        if scope.pending:
            return
        del self._scopes[scope.frame, scope.path]
        run = scope.run
        if run is None:
            self._end_walk(self._reason)
        else:
            run.inner = None
            self._queue.later(self._advance, run)

    def _end_walk(self, reason: str) -> None:
        self.ended = True
        self._queue.free_all()
        self._scopes.clear()
        self._early.clear()
        self._queue.act(EndWalk(reason, dict(self._counts)))

    # moving values

    def _deliver(self, scope: Scope, source: Source, ref: Ref | None, send: bool = True) -> None:
        """Hand a value, or its absence, to all consumers of this source."""
        fanout = self.share.fanouts.get(source, NOWHERE)
        for what, index, number in fanout.uses:
            match what:
                case "task":
                    self._tasks.give(scope, index, number, ref)
                    self._count(scope, index)
                case "import":
                    self._give_import(scope.loops[index], number, ref)
                case "start":
                    if not scope.loops[index].first:
                        self._give_start(scope.loops[index], number, ref)
                case "back":
                    self._queue.retain(ref)
                    scope.loop_run.values[number] = ref
                case _:
                    run = scope.loop_run
                    self._queue.retain(ref)
                    self._queue.release(run.last[number])
                    run.last[number] = ref
        if send and fanout.ranks:
            address, port = address_of(self.walk, source)
            for rank in fanout.ranks:
                self._queue.act(Send(rank, address, port, scope.path, ref))

    def _accept(self, scope: Scope, address: int, port: str, iteration: Iteration, present: bool) -> None:
        """Take a value, its absence or a loop's mark from another rank."""
        if port.startswith("$"):
            run = scope.loops[address - len(self.walk.tasks)]
            self._control.take_mark(run, port, iteration[-1])
            self._queue.later(self._advance, run)
            return
        key = Key(address, port, iteration) if present else None
        self._deliver(scope, source_at(self.walk, address, port), key, send=False)
        self._queue.release(key)

    def _give_import(self, run: LoopRun, number: int, ref: Ref | None) -> None:
        self._queue.retain(ref)
        run.imports[number] = ref
        if run.inner is not None:
            self._deliver(run.inner, Source(Kind.IMPORT, run.loop.index, str(number)), ref)
        self._queue.later(self._advance, run)

    def _give_start(self, run: LoopRun, number: int, ref: Ref | None) -> None:
        if run.inner is not None and run.index == run.first:
            scope = run.inner
            self._deliver(scope, Source(Kind.VAR, run.loop.index, run.loop.variables[number].port), ref)
            self._queue.later(self._finish_part, scope)
        else:
            self._queue.retain(ref)
            run.values[number] = ref
        self._control.test_start(run, number, ref)
        self._queue.later(self._advance, run)

    def _take_chunk(self, address: int, iteration: Iteration, key: Key | None) -> None:
        tasks = len(self.walk.tasks)
        if address < tasks:
            task = self.walk.tasks[address]
            scope = self._scopes[task.frame, iteration]
            source = next(e.source for e in task.inputs if e.source.kind is Kind.CHUNK and e.source.at == address)
            if key is None and not task.path:
                # Outside loops nothing is left to do for this task, even if its port is optional.
                scope.missing.add(task.index)
                self._reason = "ended"
            self._deliver(scope, source, key)
            self._queue.release(key)
            return
        run = self._loop_run(address - tasks, iteration[:-1])
        self._control.take_chunk(run, key)
        self._queue.later(self._advance, run)

    def _emit(self, outlets: Sequence[Outlet], port: str, ref: Ref, iteration: Iteration) -> None:
        for outlet in outlets:
            if outlet.port == port:
                if outlet.stream is not None:
                    self._queue.act(ToStream(ref, outlet.stream, iteration))
                else:
                    self._queue.act(Emit(ref, port, outlet.modality, iteration))

    # tasks

    def _count(self, scope: Scope, task: int) -> None:
        if self._tasks.count(scope, task):
            self._queue.later(self._skip, scope, task)

    def _skip(self, scope: Scope, task: int) -> None:
        self._finish_task(scope, task, {}, "skip")
        self._queue.release_all(scope.inputs.pop(task).values())

    def _finish_task(self, scope: Scope, index: int, keys: Mapping[str, Key], verdict: str) -> None:
        task = self.walk.tasks[index]
        self._tasks.hold(task, keys)
        for port, key in keys.items():
            self._emit(task.outlets, port, key, scope.path)
        for port in task.used:
            self._deliver(scope, Source(Kind.TASK, index, port), keys.get(port))
        run = scope.run
        if run is not None and run.loop.stop_task == index:
            self._judge(run, scope.path[-1], verdict)
        self._queue.later(self._finish_part, scope)

    # loops

    def _loop_run(self, loop: int, outer: Iteration) -> LoopRun:
        return self._scopes[self.walk.loops[loop].parent, outer].loops[loop]

    def _judge(self, run: LoopRun, iteration: int, verdict: str) -> None:
        if self._control.judge(run, iteration, verdict):
            self._queue.later(self._advance, run)

    def _begin_loop(self, run: LoopRun) -> None:
        """Give a loop the starting values that do not come from the walk itself."""
        for number, variable in enumerate(run.loop.variables):
            if run.owned[number] and (variable.start.kind is Kind.RUN or run.first):
                known = self._control.from_run(run.loop, number)
                recalled = self._control.recall(run, number) if known is None and not run.loop.runs_in_engine else None
                self._give_start(run, number, known or recalled or Held(*variable.held))
                self._queue.release(recalled)
        self._control.test_held(run)
        self._queue.later(self._advance, run)

    def _enter_loop(self, scope: Scope, run: LoopRun) -> None:
        """Bring carried values, imports and the chunk into a new iteration."""
        loop, first = run.loop, run.index == run.first
        self._control.save(run)
        for number, variable in enumerate(loop.variables):
            source = Source(Kind.VAR, loop.index, variable.port)
            known = self._control.from_run(loop, number) if first else None
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
            self._queue.release(value)
        for number, value in enumerate(run.imports):
            if not isinstance(value, Pending):
                self._deliver(scope, Source(Kind.IMPORT, loop.index, str(number)), value)
        if loop.tap is not None and self.share.leads(loop.index):
            chunk, run.chunk = run.chunk, PENDING
            if not isinstance(chunk, Pending):
                self._deliver(scope, self._chunk_source(loop), chunk)
                self._queue.release(chunk)

    def _chunk_source(self, loop: CompiledLoop) -> Source:
        over = loop.loop.over
        return Source(Kind.CHUNK, self.walk.address(loop.index), over.into[1] if over is not None else "")

    def _advance(self, run: LoopRun) -> None:
        """Open the next iteration of a loop, or end the loop, as soon as everything is known."""
        if run.over or run.inner is not None or self.ended:
            return
        if run.end is None:
            if run.loop.runs_in_engine:
                self._engine_loops.fire(run)
            else:
                self._control.decide(run)
        following = run.index + 1
        if run.end is not None and (run.loop.runs_in_engine or following >= run.end[0]):
            self._end_loop(run)
        elif following <= run.allowed and not run.loop.runs_in_engine:
            run.index = following
            self._open(run.loop.index, (*run.scope.path, following), run)

    def _end_loop(self, run: LoopRun) -> None:
        """Hand out the results of a loop once everything that was sent to it has arrived."""
        if run.end is None or PENDING in run.owned_values() or PENDING in run.imports:
            return
        run.over = True
        if run.loop.results:
            self._control.keep_held(run)
        loop, scope, values, (count, reason) = run.loop, run.scope, run.owned_values(), run.end
        if self.share.leads(loop.index):
            self._counts[loop.name] = self._counts.get(loop.name, 0) + count
        if not loop.path and reason != "done":
            self._reason = reason
        for number, result in enumerate(loop.results):
            if self.share.owners[loop.index, "=" + result.port] == self.share.rank:
                ref = run.result(number)
                if ref is not None:
                    self._emit(result.outlets, result.port, ref, scope.path)
                self._deliver(scope, Source(Kind.LOOP, loop.index, result.port), ref)
        self._queue.release_all([*values, *run.imports, *run.last, run.chunk])
        self._queue.later(self._finish_part, scope)
