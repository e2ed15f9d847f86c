"""Warm-up of a GPU's nodes before the first request: kernels load, compile and choose their plans at first use.

A module may warm itself up (`warm_up`, `requests`). For the others the model's samples run through their walks, with
zeros of the declared shapes and dtypes. At the end `rehearse` runs samples on the captured steps.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from msgspec import structs

from mstar_core.engine.base import Handle, Job, JobKey
from mstar_core.engine.module import node_module
from mstar_core.engine.ports import id_port
from mstar_core.engine.runner import NodeRunner
from mstar_core.engine.warmup import uncounted
from mstar_core.errors import MstarError
from mstar_core.graph import KV_CACHE, GraphNode, Loop, NodeSpec, PortType, graph_nodes, loops, walk_inputs
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.messages.tensors import InlineTensor, TensorRef
from mstar_core.messages.wire import Message
from mstar_core.messages.work import OpenRequest, RunInputRef, RunWalk, RunWalks, SignalRef, WalkDone, WorkFailed
from mstar_core.plugin.check.dry_run import sample_request, sample_runs
from mstar_core.plugin.params import param_specs
from mstar_core.plugin.program import Fork, Run, RunInput, Segment, Signal
from mstar_core.plugin.spec import ModelSpec, Sample
from mstar_core.transport.dtypes import Array, storage
from mstar_core.transport.message_parts import inline_numbers
from mstar_core.transport.tensors import inline
from mstar_core.worker.executor import Executor
from mstar_core.worker.outbox import Outbox

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)

TOKENS = 8
ITERATIONS: Final = 2
"""Iterations of each loop in the walks of a sample."""

REHEARSED: Final = 32
"""Iterations of the first loop of each name that draws ids, in a rehearsal: enough for a window of a codec."""

REHEARSAL_S: Final = 0.3
"""Time after which a rehearsal begins no further sample."""

WARMUP: Final = Handle(-1)
"""Handle of warm-up requests; no client's request has it."""

NAP_S: Final = 1e-4
FilledInputs = Mapping[str, Mapping[str, int | tuple[int, ...]]]
"""See `Sample.values`."""

DTYPES: Final = {
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "u8": "uint8",
    "b8": "bool",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "any": "float32",
}


def warm_module(module: nn.Module) -> None:
    """Run a module's own `warm_up`."""
    with torch.inference_mode():
        node_module(module).warm_up()
    torch.cuda.synchronize()


def samples_only_ids(node: NodeSpec) -> bool:
    """Whether a node takes ids only, so that a short prompt warms it up."""
    return node.engine is KV_CACHE and set(node.ports) <= {"tokens", "token"}


def needs_samples(node: NodeSpec, module: nn.Module) -> bool:
    """Whether a node has weights and nothing but the model's samples can warm it up."""
    has_weights = next(module.parameters(), None) is not None
    return has_weights and not node_module(module).warms_itself and not samples_only_ids(node)


def warm_prefill(runner: NodeRunner, node: NodeSpec) -> None:
    """Run one short prompt through a node that samples ids, and close the request."""
    if node.sampling is None:
        return
    sampling = SamplingParams(temperature=1.0, repetition_penalty=1.1)
    runner.open(WARMUP, sampling, TOKENS + 1)
    inputs = {id_port(node): torch.zeros(TOKENS, dtype=torch.int64)}
    runner.submit(Job(key=JobKey(-1), handle=WARMUP, inputs=inputs, outputs=(node.sampling.port,)))
    running = runner.launch()
    if running is not None:
        result = runner.collect(running)
        for failed in result.failed:
            raise failed.error
    runner.close(WARMUP)


def warm_walks(
    model: ModelSpec,
    rank: int,
    runners: Mapping[str, NodeRunner],
    nodes: Collection[str],
    max_tokens: int,
    report: Callable[[str], None],
    level: int = logging.WARNING,
) -> None:
    """Run the walks of the model's samples that use one of `nodes` and lie on this rank as a whole.

    max_tokens: cache limit of a request. report: called with each sample's name. A sample that fails is logged at this
    level: the first request of its kind then compiles what is missing.
    """
    seen: set[tuple[object, ...]] = set()
    for sample in model.samples if nodes else ():
        local = _local_runs(model, sample, runners)
        shapes = {_shapes(run) for run in _runs(local) if _nodes(model, run) & set(nodes)}
        if not shapes - seen:
            continue
        seen |= shapes
        report(sample.name)
        _run_sample(_WarmupRequest(model, rank, runners, sample.values, level), sample, local, max_tokens)


def rehearse(
    model: ModelSpec,
    rank: int,
    runners: Mapping[str, NodeRunner],
    max_tokens: int,
    report: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run samples again, after the last capture, until each walk of this rank has run, or for `REHEARSAL_S`.

    A first request would otherwise meet memory that the captures gave back, first replays of prompts, and host paths
    that have not run. Counts of graphs stay as they are, and prefixes of samples are forgotten.
    """
    until, walks, drawing = clock() + REHEARSAL_S, set[str](), set[str]()
    with ExitStack() as counts:
        for runner in runners.values():
            counts.enter_context(uncounted(runner))
        for sample in model.samples:
            local = _local_runs(model, sample, runners)
            new = {run.walk for run in _runs(local)} - walks
            if not new:
                continue
            if clock() >= until:
                break
            walks |= new
            report(sample.name)
            request = _WarmupRequest(model, rank, runners, sample.values, logging.DEBUG, drawing)
            _run_sample(request, sample, local, max_tokens)
    for runner in runners.values():
        runner.forget_prefixes()


def _local_runs(model: ModelSpec, sample: Sample, runners: Mapping[str, NodeRunner]) -> dict[str, list[Run | Fork]]:
    """Return the runs and forks of the partitions of a sample that lie on this rank as a whole."""
    return {
        partition: wishes
        for partition, wishes in sample_runs(model, sample).items()
        if all(_nodes(model, run) <= runners.keys() for run in wishes if isinstance(run, Run))
    }


def _runs(local: Mapping[str, list[Run | Fork]]) -> list[Run]:
    return [run for wishes in local.values() for run in wishes if isinstance(run, Run)]


def _run_sample(warmup: _WarmupRequest, sample: Sample, local: Mapping[str, list[Run | Fork]], max_tokens: int) -> None:
    params = sample_request(warmup.model, sample).params
    values = {spec.name: getattr(params, spec.name) for spec in param_specs(warmup.model.params)}
    try:
        warmup.run(local, values, sorted(sample.outputs), max_tokens)
    except MstarError as error:
        log.log(warmup.level, "the warm-up with sample %s failed: %s", sample.name, error)


class _WarmupRequest:
    """One synthetic request that runs on this rank with its results dropped."""

    def __init__(
        self,
        model: ModelSpec,
        rank: int,
        runners: Mapping[str, NodeRunner],
        filled: FilledInputs,
        level: int,
        drawing: set[str] | None = None,
    ) -> None:
        """drawing: loops that have drawn `REHEARSED` ids; others do so now, and are added. None: no loop does."""
        self.filled = filled
        self.drawing = drawing
        self.level = level
        self.model = model
        self.rank = rank
        self.runners = runners
        self.done: dict[int, WalkDone] = {}
        self.error = ""
        transport: Any = _ZeroTransport()
        self.outbox = Outbox("warm-up", rank, self, transport)
        self.executor = Executor(model, rank, runners, self.outbox, transport, time.monotonic)
        self.homes = dict.fromkeys((node.name for node in model.nodes if self._runs_here(node)), rank)

    def send(self, name: str, message: Message) -> bool:
        """Take a message of the outbox."""
        if isinstance(message, WalkDone):
            self.done[message.run] = message
        elif isinstance(message, WorkFailed):
            self.error = f"{message.error.message} {message.error.detail}".strip()
        return True

    def run(
        self, partitions: Mapping[str, list[Run | Fork]], params: dict[str, Any], outputs: list[str], max_tokens: int
    ) -> None:
        """Run the runs and forks of each partition until its end, an error or a stream without items.

        Partitions run one after the other, so that a later one reads the streams of those before. Raises GraphError for
        walks that do not fit.
        """
        opening = OpenRequest(
            handle=WARMUP, params=params, seed=0, homes=self.homes, max_tokens=max_tokens, outputs=outputs
        )
        self.executor.open(opening)
        numbers = itertools.count(1)
        try:
            for partition, runs in partitions.items():
                self._run_partition(partition, runs, numbers)
        finally:
            self.executor.close(WARMUP)

    def _run_partition(self, partition: str, runs: list[Run | Fork], numbers: Iterator[int]) -> None:
        forks: list[tuple[str, str]] = []
        for run in runs:
            if isinstance(run, Fork):
                forks.append((run.source, run.into))
                continue
            number = next(numbers)
            message = self._message(number, run, forks)
            self.executor.run(RunWalks(handle=WARMUP, partition=partition, runs=[message]))
            forks = []
            self._finish_steps()
            if self.error:
                log.log(self.level, "the warm-up of walk %s failed: %s", run.walk, self.error)
            if number not in self.done:
                return  # it failed, or it waits for a stream

    def _message(self, number: int, run: Run, forks: list[tuple[str, str]]) -> RunWalk:
        _, walk = self.model.walk(run.walk)
        types = walk_inputs(walk, self.model.streams)
        return RunWalk(
            run=number,
            walk=run.walk,
            max_iters={loop.name: self._iterations(loop) for loop in loops(walk)},
            branches=list(run.branches),
            sample=run.sample,
            keep=list(run.keep),
            reads=list(run.reads),
            sampling=dict(run.sampling),
            inputs={port: self._input(value, port, types[port]) for port, value in run.inputs.items()},
            forks=forks,
        )

    def _iterations(self, loop: Loop) -> int:
        if self.drawing is None or loop.stop is None or loop.name in self.drawing:
            return ITERATIONS
        self.drawing.add(loop.name)
        return REHEARSED

    def _input(self, value: RunInput, port: str, kind: PortType) -> RunInputRef:
        if isinstance(value, tuple):
            return inline_numbers(value)
        if isinstance(value, Signal):
            kept = [done.signals[value.port] for done in self.done.values() if value.port in done.signals]
            return SignalRef(key=kept[-1][0] if kept else -1, rank=self.rank)
        if not isinstance(value, Segment):
            return _zeros(DTYPES[kind.dtype], value.shape)
        fact = value.inputs.get(port) or next(iter(value.inputs.values()))
        fill = self.filled.get(value.kind, {}).get(fact.name)
        zeros = _zeros(DTYPES[kind.dtype], fact.shape)
        return zeros if fill is None else structs.replace(zeros, data=_filled(zeros, fill).tobytes())

    def _finish_steps(self) -> None:
        """Run steps until no node has work that it can do."""
        while True:
            launched = [(runner, runner.launch()) for runner in self.runners.values() if runner.pressure().ready]
            running = [(runner, step) for runner, step in launched if step is not None]
            for runner, step in running:
                while not runner.is_done(step):
                    time.sleep(NAP_S)
                self.executor.take(runner.collect(step))
            while True:
                self.outbox.flush()
                if not self.outbox.is_waiting:
                    break
                time.sleep(NAP_S)
            if not running:
                return

    def _runs_here(self, node: NodeSpec) -> bool:
        return node.name in self.runners or (node.of is not None and node.of.name in self.runners)


def _zeros(dtype: str, shape: Sequence[int]) -> InlineTensor:
    """Return a tensor that `_ZeroTransport` reads as zeros, so that large ones take no memory here."""
    return InlineTensor(dtype=dtype, shape=tuple(shape), data=b"")


def _filled(zeros: InlineTensor, fill: int | tuple[int, ...]) -> Array:
    """Return the values of a tensor: one for all elements, or each of them in order."""
    values = np.zeros(zeros.shape, storage(zeros.dtype))
    values[...] = np.reshape(fill, values.shape) if isinstance(fill, tuple) else fill
    return values


class _ZeroTransport:
    """A tensor transport whose tensors are zeros of the shape asked for, unless they bring values."""

    def put(self, array: Array, to: str, *, dtype: str | None = None) -> TensorRef:
        return inline(np.zeros(0, np.uint8))

    lend = put

    def read(self, ref: InlineTensor, copier: Callable[[Array], Tensor]) -> Tensor:
        if not ref.data:
            return copier(np.zeros(ref.shape, storage(ref.dtype)))
        return copier(np.frombuffer(bytearray(ref.data), storage(ref.dtype)).reshape(ref.shape))


def _nodes(model: ModelSpec, run: Run) -> set[str]:
    """Return the nodes of a run's walk, branches by the node that they run in."""
    uses: list[GraphNode] = list(graph_nodes(model.walk(run.walk)[1]))
    return {use.spec.name if use.spec.of is None else use.spec.of.name for use in uses}


def _shapes(run: Run) -> tuple[object, ...]:
    return (run.walk, *sorted((port, str(getattr(value, "shape", ""))) for port, value in run.inputs.items()))
