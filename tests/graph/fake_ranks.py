"""Ranks without workers: carries out the actions of WalkStates and delivers events in any order."""

from __future__ import annotations

import random
from collections.abc import Mapping

from mstar_core.graph import (
    AskStop,
    CompiledWalk,
    Emit,
    EndWalk,
    Fire,
    FireLoop,
    Free,
    Held,
    Hold,
    Key,
    Recall,
    Ref,
    RunInput,
    Send,
    Special,
    ToStream,
    WalkState,
    Want,
)
from mstar_core.graph.compile.cut import cut
from tests.graph.random_walks import LONGEST, content, is_produced, says_stop


class Ranks:
    """All ranks of one run with their stores."""

    def __init__(self, walk: CompiledWalk, home: Mapping[int | str, int], seed: int, **run: object) -> None:
        self.walk = walk
        self.rng = random.Random(seed)
        self.left = dict(run.pop("chunks", {}))  # type: ignore[call-overload]
        self.taken = dict.fromkeys(self.left, 0)
        self.states = {rank: WalkState(share, **run) for rank, share in cut(walk, home).items()}  # type: ignore[arg-type]
        self.stores: dict[int, dict[Key, int]] = {rank: {} for rank in self.states}
        self.held: dict[tuple[int, str, str], int] = {}
        self.pool: list[tuple[object, ...]] = []
        self.firings: dict[tuple[str, tuple[int, ...]], dict[str, int]] = {}
        self.emitted: list[tuple[str, int, tuple[int, ...]]] = []
        self.streamed: list[tuple[str, int, tuple[int, ...]]] = []
        self.ends: dict[int, EndWalk] = {}
        self.freed: set[tuple[int, Key]] = set()

    def start(self) -> None:
        for rank in self.rng.sample(sorted(self.states), len(self.states)):
            self.pool.append(("start", rank))

    def run(self) -> Ranks:
        self.start()
        while self.pool:
            self.step()
        return self

    def step(self) -> None:
        starts = [event for event in self.pool if event[0] == "start"]
        event = self.rng.choice(starts or self.pool)
        self.pool.remove(event)
        self.happen(event)

    def cancel(self) -> None:
        for rank, state in self.states.items():
            self.obey(rank, state.cancel())

    @property
    def counts(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        for end in self.ends.values():
            for loop, count in end.counts.items():
                totals[loop] = totals.get(loop, 0) + count
        return totals

    # events

    def happen(self, event: tuple[object, ...]) -> None:
        match event:
            case ("start", int(rank)):
                self.obey(rank, self.states[rank].start())
            case ("fired", int(rank), Fire() as fire, dict(values)):
                for port, value in values.items():
                    self.store(rank, Key(fire.task, port, fire.iteration), value)
                stop = self.stop_of(fire.task, values, fire.iteration)
                self.obey(rank, self.states[rank].done(fire.task, fire.iteration, set(values), stop))
            case ("looped", int(rank), FireLoop() as fire, str(reason), int(count), dict(values)):
                for port, value in values.items():
                    self.store(rank, Key(fire.task, port, (*fire.iteration, count - 1)), value)
                done = self.states[rank].loop_done(fire.loop, fire.iteration, reason, count, set(values))
                self.obey(rank, done)
            case ("asked", int(rank), AskStop() as ask, bool(stop)):
                self.obey(rank, self.states[rank].tested(ask.loop, ask.iteration, stop))
            case ("wanted", int(rank), Want() as want):
                self.give_chunk(rank, want)
            case ("sent", Send() as send, value):
                if value is not None:
                    self.store(send.rank, Key(send.address, send.port, send.iteration), int(value))  # type: ignore[call-overload]
                state = self.states[send.rank]
                self.obey(send.rank, state.arrived(send.address, send.port, send.iteration, value is not None))

    def give_chunk(self, rank: int, want: Want) -> None:
        state = self.states[rank]
        if not self.left[want.stream]:
            self.obey(rank, state.stream_ended(want.address, want.iteration))
            return
        self.left[want.stream] -= 1
        self.taken[want.stream] += 1
        value = content("chunk", want.stream, self.taken[want.stream])
        self.store(rank, Key(want.address, "$chunk", want.iteration), value)
        self.obey(rank, state.chunk(want.address, want.iteration))

    def stop_of(self, task: int, values: dict[str, int], iteration: tuple[int, ...]) -> bool | None:
        loop = next((loop for loop in self.walk.loops if loop.stop_task == task), None)
        if loop is None or loop.loop.stop is None:
            return None
        value = values.get(loop.loop.stop.port)
        return iteration[-1] >= LONGEST or (value is not None and says_stop(value))

    # actions

    def obey(self, rank: int, actions: list[object]) -> None:
        for action in actions:
            assert rank not in self.ends or isinstance(action, Free), "nothing but Free follows the end"
            match action:
                case Fire():
                    self.pool.append(("fired", rank, action, self.fire(rank, action)))
                case FireLoop():
                    self.pool.append(("looped", rank, action, *self.fire_loop(rank, action)))
                case AskStop(value=value):
                    self.pool.append(("asked", rank, action, says_stop(self.read(rank, value))))
                case Want():
                    self.pool.append(("wanted", rank, action))
                case Send(value=value):
                    assert action.rank != rank
                    self.pool.append(("sent", action, None if value is None else self.read(rank, value)))
                case Hold():
                    self.held[rank, action.node, action.port] = self.stores[rank][action.value]
                case Recall():
                    self.store(rank, action.value, self.read(rank, Held(action.node, action.port)))
                case Emit():
                    self.emitted.append((action.port, self.read(rank, action.value), action.iteration))
                case ToStream():
                    port = action.value.port if isinstance(action.value, Key) else ""
                    self.streamed.append((port, self.read(rank, action.value), action.iteration))
                case Free(value=key):
                    del self.stores[rank][key]
                    self.freed.add((rank, key))
                case EndWalk():
                    self.ends[rank] = action

    def store(self, rank: int, key: Key, value: int) -> None:
        assert key not in self.stores[rank] and (rank, key) not in self.freed, f"{key} came twice"
        self.stores[rank][key] = value

    def read(self, rank: int, ref: Ref) -> int:
        match ref:
            case Key():
                return self.stores[rank][ref]
            case RunInput(name=name):
                return content("run", name)
            case Held(node=node, port=port):
                return self.held.get((rank, node, port), content("held", node, port))
            case Special(step=step):
                return step

    def make(self, task: int, iteration: tuple[int, ...], inputs: dict[str, int]) -> dict[str, int]:
        """Record a task's run and return its outputs."""
        spec = self.walk.tasks[task].node.spec
        assert (spec.name, iteration) not in self.firings, "a task runs once per iteration"
        self.firings[spec.name, iteration] = dict(inputs)
        outs = [port for port in spec.ports if port.startswith(f"{spec.name}_o")]
        values = {port: content(spec.name, port, iteration, sorted(inputs.items())) for port in outs}
        return {port: value for port, value in values.items() if is_produced(value)}

    def fire(self, rank: int, fire: Fire) -> dict[str, int]:
        inputs = {port: self.read(rank, ref) for port, ref in fire.inputs.items()}
        return self.make(fire.task, fire.iteration, inputs)

    def fire_loop(self, rank: int, fire: FireLoop) -> tuple[str, int, dict[str, int]]:
        """Run a loop as the engine does."""
        inputs = {port: self.read(rank, ref) for port, ref in fire.inputs.items()}
        if fire.start is not None and says_stop(self.read(rank, fire.start)):
            return "stop", 0, {}
        if fire.limit == 0:
            return "length", 0, {}
        loop, task = self.walk.loops[fire.loop], self.walk.tasks[fire.task]
        values: dict[str, int] = {}
        required = {entry.port for entry in task.inputs if not entry.optional}
        index = 0
        while True:
            path = (*fire.iteration, index)
            values = {}
            ran = required <= set(inputs)
            if ran:
                values = self.make(fire.task, path, inputs)
                self.let_out(rank, fire.task, values, path)
            index += 1
            for variable in loop.variables:
                inputs.pop(variable.port, None)
                if variable.out in values:
                    inputs[variable.port] = values[variable.out]
            if "$step" in inputs:
                inputs["$step"] = index
            if loop.stop_task is not None and (not ran or self.stop_of(fire.task, values, path)):
                return "stop", index, values
            if fire.limit is not None and index >= fire.limit:
                return "length", index, values

    def let_out(self, rank: int, task: int, values: dict[str, int], path: tuple[int, ...]) -> None:
        for outlet in self.walk.tasks[task].outlets:
            if outlet.port in values:
                row = (outlet.port, values[outlet.port], path)
                (self.streamed if outlet.stream is not None else self.emitted).append(row)
        for port in self.walk.tasks[task].holds:
            if port in values:
                self.held[rank, self.walk.tasks[task].name, port] = values[port]
