"""Lookup of the values that actions name, and tests of stop rules. Used by the executor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from mstar_core.engine.loop import holds_id
from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import CHUNK_FIRST, CHUNK_LAST, PARAM_PREFIX, RANDOM, STEP
from mstar_core.graph.declare.walks import StopOn, StopWhen
from mstar_core.graph.runtime.actions import Held, Iteration, Key, Ref, RunInput, Special
from mstar_core.graph.runtime.addresses import saved_input
from mstar_core.plugin.program import MOST_READ
from mstar_core.worker.state.request import ActiveRun, WorkerRequest, parameter_name

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.graph.compile.compiled import CompiledTask, CompiledWalk
    from mstar_core.messages.requests import SavedLoop
    from mstar_core.messages.tensors import TensorRef


Number = float | int | bool


def gather(request: WorkerRequest, run: ActiveRun, refs: Mapping[str, Ref], iteration: Iteration) -> dict[str, Tensor]:
    """Return the inputs of a task by port, without absent ones."""
    values = {port: resolve(request, run, ref, iteration) for port, ref in refs.items()}
    return {port: value for port, value in values.items() if value is not None}


def split_numbers(
    request: WorkerRequest, run: ActiveRun, refs: Mapping[str, Ref], iteration: Iteration
) -> tuple[dict[str, Tensor], dict[str, Number]]:
    """Return the inputs of a stateless task by port, and apart from them the numbers that the runtime fills in."""
    inputs: dict[str, Tensor] = {}
    numbers: dict[str, Number] = {}
    for port, ref in refs.items():
        if type(ref) is Special:
            number = _special(request, run, ref, iteration)
            if number is not None:
                numbers[port] = number
        else:
            value = resolve(request, run, ref)
            if value is not None:
                inputs[port] = value
    return inputs, numbers


def resolve(request: WorkerRequest, run: ActiveRun, ref: Ref, iteration: Iteration = ()) -> Tensor | None:
    """Return the value of a reference, or None if it is absent."""
    match ref:
        case Key():
            return run.values[ref]
        case RunInput(name):
            return run.inputs[name]
        case Held(node, port):
            return request.held.get((node, port))
        case Special():
            number = _special(request, run, ref, iteration)
            return None if number is None else constant(number)


def _special(request: WorkerRequest, run: ActiveRun, ref: Special, iteration: Iteration) -> Number | None:
    name = ref.name
    if name == STEP:
        return ref.step
    if name.startswith(PARAM_PREFIX):
        return request.numbers.get(parameter_name(name))
    if name in (CHUNK_FIRST, CHUNK_LAST):
        first, last = run.flags.get(iteration, (False, False))
        return first if name == CHUNK_FIRST else last
    assert name == RANDOM, "the graph check admits no other special input"
    return None  # the engine makes them, per iteration


@functools.lru_cache(maxsize=4096, typed=True)
def constant(number: Number) -> Tensor:
    """Return a 0-d host tensor of a number. Shared, because inputs are never written to."""
    return torch.tensor(number)


def stop_said(request: WorkerRequest, run: ActiveRun, task: int, outputs: Mapping[str, Tensor]) -> bool | None:
    """Return the verdict of the loop's stop rule on a task's outputs; None if the task has no stop port."""
    compiled = run.share.walk.tasks[task]
    if not compiled.path:
        return None
    loop = run.share.walk.loops[compiled.path[-1]]
    if loop.stop_task != task or loop.loop.stop is None:
        return None
    value = outputs.get(loop.loop.stop.port)
    return value is not None and stops(request, loop.loop.stop, value)


def start_stops(request: WorkerRequest, run: ActiveRun, loop: int, ref: Ref) -> bool:
    """Whether a loop's stop rule holds for its starting value."""
    rule = run.share.walk.loops[loop].loop.stop
    value = resolve(request, run, ref)
    return rule is not None and value is not None and stops(request, rule, value)


def stops(request: WorkerRequest, rule: StopOn | StopWhen, value: Tensor) -> bool:
    """Whether a value ends a loop."""
    if isinstance(rule, StopWhen):
        return bool(value.any())
    if rule.unless is not None and request.params.get(rule.unless):
        return False
    return holds_id(value, rule.ids)


def wanted_ports(request: WorkerRequest, run: ActiveRun, task: CompiledTask) -> tuple[str, ...]:
    """Return the output ports that the engine returns for a task.

    A port that only feeds a stream whose reader takes no part in the request is not among them.
    """
    if task.index not in run.wanted:
        message = run.message
        kept = (port for port in (*message.keep, *message.reads) if port in task.node.spec.ports)
        leaving = (
            outlet.port
            for outlet in task.outlets
            if outlet.stream is None or outlet.stream.into[0].name in request.homes
        )
        run.wanted[task.index] = tuple(dict.fromkeys((*task.used, *leaving, *kept)))
    return run.wanted[task.index]


def held_value(request: WorkerRequest, node: str, port: str) -> Tensor:
    """Return the last value of an output port. Raises EngineError when there is none."""
    value = request.held.get((node, port))
    if value is None:
        raise EngineError(f"node {node} has not produced {port} yet", "a walk starts from its last value", node=node)
    return value


def saved_starts(
    walk: CompiledWalk, saved: Mapping[str, SavedLoop], read: Callable[[TensorRef], Tensor]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the inputs that start loops from saved states, and the iterations that these begin with, by loop.

    A state of other ports than those that the loop carries is left out.
    """
    inputs: dict[str, Tensor] = {}
    firsts: dict[str, int] = {}
    for loop in walk.loops if saved else ():
        state = saved.get(loop.name)
        if state is not None and state.values.keys() == {variable.port for variable in loop.variables}:
            inputs |= {saved_input(loop.name, port): read(ref) for port, ref in state.values.items()}
            firsts[loop.name] = state.iteration
    return inputs, firsts


def numbers_of(port: str, tensor: Tensor) -> list[int | float]:
    """Return the numbers of a value that a program reads. Raises EngineError for too many."""
    if tensor.numel() > MOST_READ:
        limit = f"a program reads at most {MOST_READ}"
        raise EngineError(f"port {port!r} has {tensor.numel()} numbers", limit, "read a summary, or keep= the value")
    numbers: list[int | float] = tensor.reshape(-1).tolist()
    return numbers


def described(key: int, tensor: Tensor) -> tuple[int, str, list[int]]:
    """Return key, dtype and shape of a kept value, for the conductor."""
    return key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
