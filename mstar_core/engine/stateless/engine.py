"""Engine for nodes without a cache: a NodeRunner. Used by the worker's loop.

Jobs whose inputs agree in shape share a batch, the most urgent first; jobs of one request keep their order. On CUDA,
steps run on a stream of their own, beside the worker's.
"""

from __future__ import annotations

import contextlib
import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.base import NO_ADAPTER, Done, Failed, Handle, Pressure, StepResult
from mstar_core.engine.failures import node_error
from mstar_core.engine.jobs import CandidateInputs, accepts, declares, required_ports
from mstar_core.engine.loop import EngineLoop, starting_values
from mstar_core.engine.marks import marks_of
from mstar_core.engine.memory.node_memory import NodeMemory
from mstar_core.engine.module import node_module
from mstar_core.engine.port_check import PortCheck, require_dict
from mstar_core.engine.runner import NodeRunner
from mstar_core.engine.slack import HOLD_LIMIT_S, Slack, StepCost
from mstar_core.engine.stateless.group import StatelessFollower, StatelessLead
from mstar_core.engine.stateless.inputs import BatchPorts, Number, is_on_gpu
from mstar_core.engine.stateless.outputs import BatchOutputs
from mstar_core.engine.stateless.step import StatelessStep, stays
from mstar_core.errors import EngineError, MstarError
from mstar_core.graph.declare.nodes import STEP, keyword
from mstar_core.layers.rng import to_int64

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_core.engine.base import Job
    from mstar_core.engine.cuda_graphs.cache import GraphCounts
    from mstar_core.engine.group.link import PlanSender
    from mstar_core.engine.kv.model_runner import Faults
    from mstar_core.engine.runner import Running
    from mstar_core.engine.stateless.outputs import Output
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.graph.declare.sampling import SamplingParams
    from mstar_core.parallel.collectives import TorchCollectives

FULL_BATCH: Final = 32
"""Items of a batch that is not delayed: 64 codec windows take 0.040 ms each, 32 take 0.043, 8 take 0.061."""

WAITING_SHARE: Final = 4
"""A step may be delayed until one in so many of the open requests has a job."""

PLAYBACK_AHEAD_S: Final = 0.1
"""Playback that every waiting request must have buffered for a step to be delayed."""

PATIENCE_S: Final = 0.02
"""Longest delay of a step."""


@dataclass(slots=True)
class _Entry:
    """A job in the queue. loop: its loop once that has begun.

    rank: small goes first, by urgency, then age. width: batch items; split: inputs with one value per item.
    key: what jobs of one batch share, None where it changes with each iteration. wanted: ports that the module must
    return. inputs_ready: event after which its inputs on the device are ready.
    """

    job: Job
    request: _Request
    since: float
    inputs: dict[str, Tensor | Number]
    loop: EngineLoop | None = None
    rank: tuple[float, int] = (0.0, 0)
    width: int = 1
    split: frozenset[str] = frozenset()
    key: tuple[object, ...] | None = None
    wanted: tuple[str, ...] = ()
    inputs_ready: torch.cuda.Event | None = None


@dataclass(slots=True)
class _Request:
    """An open request. runs: jobs and iterations run so far; last_values: last value of each output."""

    handle: Handle
    seed: int
    queue: deque[_Entry] = field(default_factory=deque)
    last_values: dict[str, Tensor] = field(default_factory=dict)
    runs: int = 0
    is_failed: bool = False


class StatelessEngine(NodeRunner):
    """Runs one stateless node on one device.

    The module's forward gets each port stacked on a leading batch dimension: [B, ...] (numbers: [B]), or a list of B
    tensors for a port outside `spec.batch_key`, or in `spec.ragged`, whose shapes differ. It returns [B, ...] or a list
    of B per port, with None for an item that does not produce it. A forward that names `seeds` or `counters` gets them
    as int64 [B]: the request's seed, and how often this node has run for the request before.

    A job of several candidates brings values for each on its inputs' first axis, or one for all. A node with
    `per="request"` gets them as one batch item, any other as that many. If no input has a value for each, the job is
    one batch item and its outputs belong to all candidates.
    """

    def __init__(
        self,
        spec: NodeSpec,
        module: nn.Module,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_batch: int = 32,
        lookahead: int = 0,
        clock: Callable[[], float] = time.monotonic,
        faults: Faults | None = None,
    ) -> None:
        self.name = spec.name
        self._spec = spec
        self._module = module
        self._offers = offers = node_module(module)
        self._device = device
        self._dtype = dtype
        self._max_batch = max_batch
        self._most_values = offers.most_values
        self._lookahead = lookahead
        self._clock = clock
        self._faults = faults
        self._candidates = CandidateInputs(spec)
        self._ports = BatchPorts(spec, offers, device, dtype)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._takes_step = accepts(module, keyword(STEP))
        self._takes_seeds = declares(module, "seeds")
        self._takes_counters = declares(module, "counters")
        self._check = PortCheck(spec)
        self._outputs = BatchOutputs(spec.name, offers.host_outputs, device)
        self._device_outputs: frozenset[str] = frozenset(offers.device_outputs)
        self._requests: dict[Handle, _Request] = {}
        self._in_flight: list[StatelessStep] = []
        self._last: torch.cuda.Event | None = None
        self._ready = StepResult()
        self._lead: StatelessLead | None = None
        self._submitted = 0
        self._collected = 0.0
        self._slack = Slack()
        self._cost = StepCost()
        self._mark = marks_of(device, clock)

    def lead(self, sender: PlanSender, collectives: TorchCollectives, size: int) -> None:
        """Send every forward of this node to the followers of a group of `size` ranks."""
        self._lead = StatelessLead(self.name, sender, collectives)

    def follower(self, collectives: TorchCollectives) -> StatelessFollower:
        """Return the executor of a leader's forwards on this node, whose own queue then stays empty."""
        return StatelessFollower(self._module, collectives)

    def node_memory(self) -> NodeMemory:
        """See NodeRunner: the module."""
        return NodeMemory(module=self._module)

    def open(
        self, handle: Handle, sampling: SamplingParams, max_tokens: int, rows: int = 1, adapter: int = NO_ADAPTER
    ) -> None:
        """See NodeRunner. Raises EngineError for a handle in use."""
        if handle in self._requests:
            raise EngineError(f"handle {handle} is already open at node {self.name}", node=self.name)
        self._requests[handle] = _Request(handle, to_int64(sampling.seed))

    def submit(self, job: Job) -> None:
        """See NodeRunner."""
        request = self._requests.get(job.handle)
        if request is None or request.is_failed:
            return
        self._submitted += 1
        entry = _Entry(
            job, request, self._clock(), {}, rank=(-job.urgency, self._submitted), wanted=required_ports(job)
        )
        try:
            entry.inputs = {name: self._taken(name, value) for name, value in (job.inputs | job.numbers).items()}
            self._spread(entry, entry.inputs)
            if job.loop is None:
                entry.key = self._batch_key(entry)
        except (MstarError, RuntimeError) as error:
            self._fail(self._ready, entry, error)
            return
        if self._stream is not None and any(is_on_gpu(value) for value in job.inputs.values()):
            entry.inputs_ready = torch.cuda.current_stream(self._device).record_event()
        request.queue.append(entry)

    def require_inputs(self, giver: str, inputs: Mapping[str, Tensor]) -> None:
        """See NodeRunner."""
        self._check.require_inputs(giver, inputs)

    def close(self, handle: Handle) -> None:
        """See NodeRunner."""
        self._requests.pop(handle, None)

    def yield_to(self, slack: Slack) -> None:
        """See NodeRunner."""
        self._slack = slack
        slack.costs.append(self._cost)

    def pressure(self) -> Pressure:
        """See NodeRunner."""
        ended, ready = len(self._ready.done) + len(self._ready.failed), 0
        oldest, urgency = float("inf"), float("-inf")
        for request in self._requests.values():
            if request.queue:
                ready += len(request.queue)
                oldest = min(oldest, request.queue[0].since)
                urgency = max(urgency, -request.queue[0].rank[0])
        if len(self._in_flight) > self._lookahead:
            return Pressure(waiting=ready + ended)
        few = ready < min(FULL_BATCH, len(self._requests) // WAITING_SHARE)
        is_patient = few and not ended and urgency < -PLAYBACK_AHEAD_S and self._clock() - oldest < PATIENCE_S
        feeds = bool(self._device_outputs) and not ended
        return Pressure(ready=ready + ended, oldest_s=oldest, is_patient=is_patient, feeds=feeds)

    def launch(self) -> StatelessStep | None:
        """See NodeRunner."""
        if len(self._in_flight) > self._lookahead:
            return None
        started = self._clock()
        with torch.inference_mode(), self._on_stream():
            batch = self._choose()
            result, self._ready = self._ready, StepResult()
            if not batch and not (result.done or result.failed):
                return None
            self._await_inputs(batch)
            units = sum([_units(entry) for entry in batch if entry.job.yields])
            work = self._cost.begin(self._mark(), units, units) if units else None
            self._run(result, batch)
            if work is not None:
                work.end = self._mark()
            finished = None if self._stream is None else self._stream.record_event()
        running = StatelessStep(result, started, finished, stays(result, self._device_outputs), self._last)
        self._last = finished
        self._in_flight.append(running)
        return running

    def is_done(self, running: Running) -> bool:
        """See NodeRunner."""
        assert isinstance(running, StatelessStep)
        return running.is_done

    def collect(self, running: Running) -> StepResult:
        """See NodeRunner. Steps must be collected in launch order."""
        assert isinstance(running, StatelessStep) and self._in_flight and self._in_flight[0] is running
        self._in_flight.pop(0)
        result = running.result
        running.hand_over(self._device)
        result.drop_closed(self._requests)
        now = self._clock()
        result.duration_s = now - max(running.started, self._collected)
        self._collected = now
        self._cost.settle()
        return result

    def idle(self) -> bool:
        """See NodeRunner: does one piece of the module's background work."""
        with torch.inference_mode(), self._on_stream():
            return self._offers.idle()

    def compile_later(self) -> None:
        """See NodeRunner: forwarded to the module."""
        with torch.inference_mode(), self._on_stream():
            self._offers.compile_later()

    @property
    def graph_counts(self) -> GraphCounts | None:
        """Counts of the module's graphs, if it has any."""
        return self._offers.graph_counts

    def counters(self) -> dict[str, float]:
        """See NodeRunner: counters of the module."""
        return self._offers.counters()

    # -- the engine's stream -----------------------------------------------------------------------------------------

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _taken(self, name: str, value: Tensor | Number) -> Tensor | Number:
        """See BatchPorts. Uploads use the engine's stream, because the worker's may be busy for long."""
        if not self._ports.is_sent(name, value):  # entering a stream costs more than the rest
            return self._ports.taken(name, value)
        with self._on_stream():
            return self._ports.taken(name, value)

    def _await_inputs(self, batch: list[_Entry]) -> None:
        """Make the engine's stream, not the host, wait for inputs that the worker's stream computes."""
        if self._stream is None:
            return
        for entry in batch:
            if entry.inputs_ready is not None:
                self._stream.wait_event(entry.inputs_ready)
                for value in entry.inputs.values():
                    if isinstance(value, torch.Tensor) and value.is_cuda:
                        value.record_stream(self._stream)
                entry.inputs_ready = None

    # -- forming a batch ---------------------------------------------------------------------------------------------

    def _choose(self) -> list[_Entry]:
        """Return the most urgent job and those that can share its batch. Jobs of a request keep their order."""
        heads = []
        for request in self._requests.values():
            if request.queue and self._start(request):
                heads.append((request.queue[0].rank, request.handle))
        heapq.heapify(heads)
        batch: list[_Entry] = []
        key, items, values, left_s = None, 0, 0, None
        while heads and items < self._max_batch:
            _, handle = heapq.heappop(heads)
            request = self._requests[handle]
            entry = request.queue[0]
            entry_key = entry.key or self._batch_key(entry)
            if (key is not None and entry_key != key) or (batch and items + entry.width > self._max_batch):
                continue
            values += _units(entry) if self._most_values else 0
            if batch and values > self._most_values:
                break
            if entry.job.yields:
                left_s = self._slack.left_s() if left_s is None else left_s
                if not self._may_take(entry, left_s, is_first=not batch):
                    self._slack.is_holding = True
                    continue
                left_s -= self._cost.of(_units(entry))
            key, items = entry_key, items + entry.width
            batch.append(request.queue.popleft())
            # A loop runs before jobs submitted after it, and starts only when earlier jobs have produced its values.
            if entry.job.loop is None and request.queue and request.queue[0].job.loop is None:
                heapq.heappush(heads, (request.queue[0].rank, handle))
        return batch

    def _may_take(self, entry: _Entry, left_s: float, *, is_first: bool) -> bool:
        """Return whether a job fits into the time that listeners leave, or has been held for too long."""
        if self._cost.of(_units(entry)) <= left_s:
            return True
        return is_first and self._clock() - entry.since > HOLD_LIMIT_S

    def _start(self, request: _Request) -> bool:
        """Prepare the first job of a request and end loops without iterations. Returns whether a job is left."""
        while request.queue:
            entry = request.queue[0]
            if entry.job.loop is None or entry.loop is not None:
                return True
            try:
                ended = self._start_loop(entry)
            except (MstarError, RuntimeError) as error:
                self._fail(self._ready, entry, error)
                return False
            if ended is None:
                return True
            self._ready.done.append(ended)
            request.queue.popleft()
        return False

    def _start_loop(self, entry: _Entry) -> Done | None:
        spec = entry.job.loop
        assert spec is not None
        carried = starting_values(spec, entry.inputs, entry.request.last_values, self._tensor, self.name)
        entry.loop = EngineLoop(job=entry.job, spec=spec, limit=spec.max_iters, carried=carried)
        self._spread(entry, {**entry.inputs, **carried})
        return entry.loop.end_at_start()

    def _inputs(self, entry: _Entry) -> dict[str, Tensor | Number]:
        """Return the inputs of a job's next run, with the values that its loop carries and the iteration."""
        if entry.loop is None:
            return entry.inputs
        ports = {**entry.inputs, **entry.loop.carried}
        if STEP in entry.inputs or self._takes_step:
            ports[STEP] = torch.tensor(entry.loop.iteration, dtype=torch.int64)
        return ports

    def _batch_key(self, entry: _Entry) -> tuple[object, ...]:
        return self._ports.key(self._inputs(entry), entry.split)

    # -- running -----------------------------------------------------------------------------------------------------

    def _run(self, result: StepResult, batch: list[_Entry]) -> None:
        """Run a batch, and all iterations of its fused loops. Other loops return to the head of their queue.

        So does a fused loop that emits, because emissions are reported per step.
        """
        groups = [batch] if batch else []
        while groups:
            continuing: dict[tuple[object, ...], list[_Entry]] = {}
            for entry, outputs in self._isolated(result, groups.pop()):
                if not self._settle(result, entry, outputs):
                    continue
                loop = entry.job.loop
                if loop is not None and loop.fused and not loop.emit:
                    continuing.setdefault(self._batch_key(entry), []).append(entry)
                else:
                    entry.since = self._clock()
                    entry.request.queue.appendleft(entry)
            groups += continuing.values()

    def _isolated(self, result: StepResult, batch: list[_Entry]) -> list[tuple[_Entry, dict[str, Tensor]]]:
        """Return the outputs of each job. If a batch fails, its jobs run one by one, so that only the bad ones fail."""
        try:
            outputs = self._forward(batch)
        except Exception as error:  # noqa: BLE001 the isolation boundary of a batch
            if len(batch) == 1:
                if not batch[0].request.is_failed:
                    self._fail(result, batch[0], error)
                return []
            return [pair for entry in batch for pair in self._isolated(result, [entry])]
        for entry in batch:
            entry.request.runs += 1
        result.rows += sum(entry.width for entry in batch)
        result.ran += [entry.job.key for entry in batch]
        return list(zip(batch, outputs, strict=True))

    def _forward(self, batch: list[_Entry]) -> list[dict[str, Tensor]]:
        if self._faults is not None:
            self._faults([entry.request.handle for entry in batch])
        inputs = [self._inputs(entry) for entry in batch]
        ports: dict[str, object] = {}
        for name in inputs[0]:
            items = [(entry.width, name in entry.split) for entry in batch]
            ports[self._ports.word(name)] = self._ports.stacked(name, [values[name] for values in inputs], items)
        if self._takes_seeds:
            ports["seeds"] = self._per_item("seeds", batch, [entry.request.seed for entry in batch])
        if self._takes_counters:
            ports["counters"] = self._per_item("counters", batch, self._counters(batch))
        outputs = self._computed(ports)
        given = tuple(outputs)
        for entry in batch:
            self._check.require(entry.wanted, given, outputs)
        return self._outputs.split(outputs, [entry.width for entry in batch])

    def _computed(self, ports: dict[str, object]) -> dict[str, Output]:
        """Return the module's outputs, in lockstep with the followers if there are any. Raises GroupEnded."""
        if self._lead is None:
            outputs: dict[str, Output] = self._module(**ports)
        else:
            ports = self._lead.publish(ports)
            try:
                outputs = self._module(**ports)
            except Exception as error:
                raise self._lead.failed(error) from error
        require_dict(self.name, outputs)
        return outputs

    def _counters(self, batch: list[_Entry]) -> list[int]:
        """Return the earlier runs of each job's request; jobs of one request count up within the batch."""
        ahead: dict[int, int] = {}
        counters = []
        for entry in batch:
            counters.append(entry.request.runs + ahead.get(entry.request.handle, 0))
            ahead[entry.request.handle] = ahead.get(entry.request.handle, 0) + 1
        return counters

    def _per_item(self, name: str, batch: list[_Entry], values: list[int]) -> Tensor | np.ndarray:
        spread = [value for entry, value in zip(batch, values, strict=True) for _ in range(entry.width)]
        if self._ports.is_host(name):
            return np.array(spread, dtype=np.int64)
        return self._ports.sent(torch.tensor(spread, dtype=torch.int64))

    def _settle(self, result: StepResult, entry: _Entry, outputs: dict[str, Tensor]) -> bool:
        """Report a run. Returns whether its loop goes on."""
        job, loop = entry.job, entry.loop
        if loop is None:
            kept = {port: outputs[port] for port in job.outputs if port in outputs}
            entry.request.last_values.update(kept)
            result.done.append(Done(job=job, outputs=kept))
            return False
        try:
            emission, ended = loop.advance(outputs, self.name)
        except (MstarError, RuntimeError) as error:
            self._fail(result, entry, error)
            return False
        if emission is not None:
            result.emissions.append(emission)
        if entry.width > 1:
            entry.split = entry.split.union(loop.carried)
        if ended is None:
            return True
        entry.request.last_values.update(loop.values)
        result.done.append(ended)
        return False

    def _fail(self, result: StepResult, entry: _Entry, error: Exception) -> None:
        result.failed.append(Failed(job=entry.job, error=node_error(self.name, error)))
        entry.request.is_failed = True
        entry.request.queue.clear()

    def _tensor(self, name: str, value: Tensor | Number) -> Tensor:
        taken = self._ports.taken(name, value)
        return taken if isinstance(taken, torch.Tensor) else torch.tensor(taken)

    def _spread(self, entry: _Entry, inputs: Mapping[str, Tensor | Number]) -> None:
        """Find the inputs with one value per candidate. Raises EngineError for one that fits neither way."""
        count = entry.job.rows
        if count == 1 or self._spec.per != "row":
            return
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        split = [name for name, value in tensors.items() if self._candidates.is_split(name, value, count)]
        entry.split, entry.width = frozenset(split), count if split else 1


def _units(entry: _Entry) -> int:
    """Return the elements of a job's inputs, which its time follows."""
    return sum(value.numel() for value in entry.inputs.values() if isinstance(value, torch.Tensor)) or 1
