"""The stateless engine: a NodeRunner for nodes that keep nothing between firings. Used by the worker's loop.

Rows whose inputs agree in shape run together, the most urgent first. A request's own jobs keep their order. On CUDA
the steps run on a stream of their own, beside what the worker's stream does.
"""

from __future__ import annotations

import contextlib
import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.base import Done, Emission, Failed, Handle, MemoryUse, Pressure, StepResult
from mstar_core.engine.failures import node_error
from mstar_core.engine.loop_rules import carried_values, stops
from mstar_core.engine.ports import CandidateInputs, accepts, declares, keyword
from mstar_core.engine.sampling.sampler import to_int64
from mstar_core.engine.stateless.inputs import BatchPorts, Number, is_on_gpu
from mstar_core.engine.stateless.running import StatelessRunning, stays
from mstar_core.engine.transfers import HostRing
from mstar_core.errors import EngineError, MstarError
from mstar_core.graph.spec.nodes import STEP

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_core.engine.base import Job, Running, SamplingParams
    from mstar_core.engine.cuda_graphs.cache import GraphCounts
    from mstar_core.engine.kv.model_runner import Faults
    from mstar_core.graph.spec.nodes import NodeSpec

MOST_TOGETHER: Final = 32
"""Rows for which no step waits any more: 64 windows of a codec cost 0.040 ms each, 32 cost 0.043, 8 cost 0.061."""

SHARE_TOGETHER: Final = 4
"""A step may wait until one in so many of the open requests has a row."""

AHEAD_S: Final = 0.1
"""Sound that every client of a waiting row must have in hand."""

PATIENCE_S: Final = 0.02
"""How long a row waits for others at most."""


@dataclass(slots=True)
class _Entry:
    """A job in the queue. carried: what a loop's next iteration takes in place of its inputs.

    rank: small goes first, by urgency, then age. width: batch rows; dealt: inputs that hold a value for each. key: what
    may share its batch, None where that changes from firing to firing. made: when its inputs on the device are there.
    """

    job: Job
    request: _Request
    since: float
    inputs: dict[str, Tensor | Number]
    carried: dict[str, Tensor] = field(default_factory=dict)
    iteration: int = 0
    rank: tuple[float, int] = (0.0, 0)
    width: int = 1
    dealt: frozenset[str] = frozenset()
    key: tuple[object, ...] | None = None
    made: torch.cuda.Event | None = None


@dataclass(slots=True)
class _Request:
    """What is known of a request here. fired: firings so far; held: what carried ports last held."""

    handle: Handle
    seed: int
    queue: deque[_Entry] = field(default_factory=deque)
    held: dict[str, Tensor] = field(default_factory=dict)
    fired: int = 0
    is_failed: bool = False


class StatelessEngine:
    """Runs one stateless node on one device. Owned by the worker; every call comes from its one thread.

    A module may name `host_ports`, inputs that it wants on the host: it gets them as numpy arrays [B, ...] (a list of B
    where their shapes differ), numbers as int64 (booleans too) or float64; and `listed_ports`, inputs that it gets as a
    list of B tensors, which are large and not copied together. It may name `host_outputs`, outputs that
    leave the GPU in one copy per step: those of a job are views of memory that serves again three steps later, and are
    to be copied by then. A module on CUDA may keep an output in one place, where the next step overwrites it.
    It may name `device_outputs`, outputs that nodes of this device go on with, in memory of their own: a step that
    gives nothing else is done when the one before it is, and what takes its outputs is launched behind it.
    `idle() -> bool` of a module is work for moments without any, `counters()` what it counts. `compile_later()` runs
    what it is still to capture, see CompilesLater, and `graph_counts` is what its graphs count in.

    The module's forward gets each port stacked on a leading batch dimension: [B, ...] (numbers: [B]), or a list of B
    tensors for a port outside `spec.batch_key`, or in `spec.ragged`, whose shapes differ. It returns [B, ...] or a list
    of B per port, with None for a row that does not produce it. A forward that names `seeds` or `counters` gets them as
    int64 [B]: the request's seed, and how many firings of this node the request had before this one.

    A job of several rows brings values for each on its inputs' first axis, or one for all; a node with `per="request"`
    gets them as one batch row, any other as that many. Where no input has a value for each row there is nothing to do
    more than once: the job is one batch row, and what it gives is every row's.
    """

    def __init__(
        self, spec: NodeSpec, module: nn.Module, *, device: torch.device, dtype: torch.dtype, max_batch: int = 32,
        lookahead: int = 0, clock: Callable[[], float] = time.monotonic, faults: Faults | None = None,
    ) -> None:  # fmt: skip
        self.name = spec.name
        self._spec = spec
        self._module = module
        self._device = device
        self._dtype = dtype
        self._max_batch = max_batch
        self._lookahead = lookahead
        self._clock = clock
        self._faults = faults
        self._candidates = CandidateInputs(spec)
        self._ports = BatchPorts(spec, module, device, dtype)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._takes_step = accepts(module, keyword(STEP))
        self._wants_seeds = declares(module, "seeds")
        self._wants_counters = declares(module, "counters")
        self._host_outputs: frozenset[str] = frozenset(getattr(module, "host_outputs", ()))
        self._device_outputs: frozenset[str] = frozenset(getattr(module, "device_outputs", ()))
        self._rings = {port: HostRing() for port in self._host_outputs} if self._stream is not None else {}
        self._requests: dict[Handle, _Request] = {}
        self._in_flight: list[StatelessRunning] = []
        self._last: torch.cuda.Event | None = None
        self._ready = StepResult()
        self._submitted = 0

    def open(self, handle: Handle, sampling: SamplingParams, max_tokens: int, rows: int = 1) -> None:
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
        entry = _Entry(job, request, self._clock(), {}, rank=(-job.urgency, self._submitted))
        try:
            entry.inputs = {name: self._taken(name, value) for name, value in (job.inputs | job.numbers).items()}
            self._spread(entry, entry.inputs)
            if job.loop is None:
                entry.key = self._batch_key(entry)
        except (MstarError, RuntimeError) as error:
            self._fail(self._ready, entry, error)
            return
        if self._stream is not None and any(is_on_gpu(value) for value in job.inputs.values()):
            entry.made = torch.cuda.current_stream(self._device).record_event()
        request.queue.append(entry)

    def fork(self, handle: Handle, source: str, into: str) -> None:
        """Nothing is kept, so there is nothing to fork."""

    def close(self, handle: Handle) -> None:
        """See NodeRunner."""
        self._requests.pop(handle, None)

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
        few = ready < min(MOST_TOGETHER, len(self._requests) // SHARE_TOGETHER)
        is_patient = few and not ended and urgency < -AHEAD_S and self._clock() - oldest < PATIENCE_S
        feeds = bool(self._device_outputs) and not ended
        return Pressure(ready=ready + ended, oldest_s=oldest, is_patient=is_patient, feeds=feeds)

    def launch(self) -> StatelessRunning | None:
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
            self._run(result, batch)
            finished = None if self._stream is None else self._stream.record_event()
        running = StatelessRunning(result, started, finished, stays(result, self._device_outputs), self._last)
        self._last = finished
        self._in_flight.append(running)
        return running

    def is_done(self, running: Running) -> bool:
        """See NodeRunner."""
        assert isinstance(running, StatelessRunning)
        return running.is_done

    def collect(self, running: Running) -> StepResult:
        """See NodeRunner. Steps must be collected in launch order."""
        assert isinstance(running, StatelessRunning) and self._in_flight and self._in_flight[0] is running
        self._in_flight.pop(0)
        result = running.result
        running.take_over(self._device)
        result.done = [done for done in result.done if done.job.handle in self._requests]
        result.failed = [failed for failed in result.failed if failed.job.handle in self._requests]
        result.emissions = [item for item in result.emissions if item.job.handle in self._requests]
        result.duration_s = self._clock() - running.started
        return result

    def memory(self) -> MemoryUse:
        """See NodeRunner: nothing is held."""
        return MemoryUse()

    def idle(self) -> bool:
        """Do one piece of the module's background work, where it has any. True when more is left."""
        work = getattr(self._module, "idle", None)
        if not callable(work):
            return False
        with torch.inference_mode(), self._on_stream():
            return bool(work())

    def compile_later(self) -> None:
        """See CompilesLater: what the module does for it, if anything."""
        work = getattr(self._module, "compile_later", None)
        if callable(work):
            with torch.inference_mode(), self._on_stream():
                work()

    @property
    def graph_counts(self) -> GraphCounts | None:
        """Those of the module's graphs, where it tells them."""
        found: GraphCounts | None = getattr(self._module, "graph_counts", None)
        return found

    def counters(self) -> dict[str, float]:
        """See Counted: what the module counts, where it counts anything."""
        counts = getattr(self._module, "counters", None)
        return dict(counts()) if callable(counts) else {}

    # -- streams of the device ---------------------------------------------------------------------------------------

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _taken(self, name: str, value: Tensor | Number) -> Tensor | Number:
        """See BatchPorts. What comes from the host travels on the own stream: the worker's may be long busy."""
        if not self._ports.is_sent(name, value):  # to enter a stream costs more than all the rest here
            return self._ports.taken(name, value)
        with self._on_stream():
            return self._ports.taken(name, value)

    def _await_inputs(self, batch: list[_Entry]) -> None:
        """Let the own stream wait for inputs that the worker's stream makes; the host does not."""
        if self._stream is None:
            return
        for entry in batch:
            if entry.made is not None:
                self._stream.wait_event(entry.made)
                for value in entry.inputs.values():
                    if isinstance(value, torch.Tensor) and value.is_cuda:
                        value.record_stream(self._stream)
                entry.made = None

    # -- forming a batch ---------------------------------------------------------------------------------------------

    def _choose(self) -> list[_Entry]:
        """The most urgent job and what may run with it, in order; a request's jobs never overtake each other."""
        heads = []
        for request in self._requests.values():
            if request.queue and self._start(request):
                heads.append((request.queue[0].rank, request.handle))
        heapq.heapify(heads)
        batch: list[_Entry] = []
        key, rows = None, 0
        while heads and rows < self._max_batch:
            _, handle = heapq.heappop(heads)
            request = self._requests[handle]
            entry = request.queue[0]
            own = entry.key or self._batch_key(entry)
            width = entry.width
            if (key is not None and own != key) or (batch and rows + width > self._max_batch):
                continue
            key, rows = own, rows + width
            batch.append(request.queue.popleft())
            # A loop goes on with its own next iteration before anything that was submitted after it, and begins only
            # when what it may start from is there.
            if entry.job.loop is None and request.queue and request.queue[0].job.loop is None:
                heapq.heappush(heads, (request.queue[0].rank, handle))
        return batch

    def _start(self, request: _Request) -> bool:
        """Prepare the first job of a request; ends loops that have nothing to do. False when none is left."""
        while request.queue:
            entry = request.queue[0]
            loop = entry.job.loop
            if loop is None or entry.carried or entry.iteration:
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
        loop = entry.job.loop
        assert loop is not None
        given = {name: self._tensor(name, value) for name, value in entry.inputs.items() if name in loop.carry.values()}
        values = carried_values(loop, given, entry.request.held, self.name)
        entry.carried = {into: self._tensor(into, value) for into, value in values.items()}
        self._spread(entry, {**entry.inputs, **entry.carried})
        start = {port: entry.carried[into] for port, into in loop.carry.items()}
        is_stopped = loop.stop_port in start and stops(loop, start[loop.stop_port])
        if not is_stopped and loop.max_iters > 0:
            return None
        kept = {port: value for port, value in start.items() if port in entry.job.outputs}
        return Done(job=entry.job, outputs=kept, reason="stop" if is_stopped else "length")

    def _given(self, entry: _Entry) -> dict[str, Tensor | Number]:
        """Inputs of the next firing of a job, with what its loop carries and counts."""
        if entry.job.loop is None:
            return entry.inputs
        ports = {**entry.inputs, **entry.carried}
        if STEP in entry.inputs or self._takes_step:
            ports[STEP] = torch.tensor(entry.iteration, dtype=torch.int64)
        return ports

    def _batch_key(self, entry: _Entry) -> tuple[object, ...]:
        return self._ports.key(self._given(entry), entry.dealt)

    # -- running -----------------------------------------------------------------------------------------------------

    def _run(self, result: StepResult, batch: list[_Entry]) -> None:
        """Run a batch, and all iterations of its fused loops; others go back to the head of their queue.

        So does a fused loop that tells its iterations: each is told at the end of a step.
        """
        groups = [batch] if batch else []
        while groups:
            going: dict[tuple[object, ...], list[_Entry]] = {}
            for entry, outputs in self._isolated(result, groups.pop()):
                if not self._settle(result, entry, outputs):
                    continue
                loop = entry.job.loop
                if loop is not None and loop.fused and not loop.emit:
                    going.setdefault(self._batch_key(entry), []).append(entry)
                else:
                    entry.since = self._clock()
                    entry.request.queue.appendleft(entry)
            groups += going.values()

    def _isolated(self, result: StepResult, batch: list[_Entry]) -> list[tuple[_Entry, dict[str, Tensor]]]:
        """Outputs of each job; when a batch fails its jobs run one by one, so that only the bad ones fail."""
        try:
            outputs = self._forward(batch)
        except Exception as error:  # noqa: BLE001 the isolation boundary of a batch
            if len(batch) == 1:
                if not batch[0].request.is_failed:
                    self._fail(result, batch[0], error)
                return []
            return [pair for entry in batch for pair in self._isolated(result, [entry])]
        for entry in batch:
            entry.request.fired += 1
        result.rows += sum(entry.width for entry in batch)
        return list(zip(batch, outputs, strict=True))

    def _forward(self, batch: list[_Entry]) -> list[dict[str, Tensor]]:
        if self._faults is not None:
            self._faults([entry.request.handle for entry in batch])
        given, rows = [self._given(entry) for entry in batch], [entry.width for entry in batch]
        ports: dict[str, object] = {}
        for name in given[0]:
            counts = [(entry.width, name in entry.dealt) for entry in batch]
            ports[self._ports.word(name)] = self._ports.stacked(name, [each[name] for each in given], counts)
        if self._wants_seeds:
            ports["seeds"] = self._per_row(batch, [entry.request.seed for entry in batch])
        if self._wants_counters:
            ports["counters"] = self._per_row(batch, self._counters(batch))
        outputs = self._module(**ports)
        if self._stream is not None:
            for port in self._host_outputs & set(outputs):
                outputs[port] = self._to_host(port, outputs[port])
        return self._shares(batch, outputs, rows)

    def _to_host(self, port: str, value: Tensor | list[Tensor | None]) -> Tensor | list[Tensor | None]:
        """An output in pinned memory, there when the step is finished. Rows of different lengths go as one copy too."""
        ring = self._rings[port]
        if isinstance(value, torch.Tensor):
            return ring.copy(value) if value.is_cuda else value
        there = [row for row in value if row is not None]
        if not there or not all(row.is_cuda for row in there):
            return value
        flat = ring.copy(torch.cat([row.flatten() for row in there]))
        parts = iter(flat.split([row.numel() for row in there]))
        return [None if row is None else next(parts).view(row.shape) for row in value]

    def _counters(self, batch: list[_Entry]) -> list[int]:
        """Earlier firings of each job's request; jobs of one request count up within the batch."""
        ahead: dict[int, int] = {}
        counters = []
        for entry in batch:
            counters.append(entry.request.fired + ahead.get(entry.request.handle, 0))
            ahead[entry.request.handle] = ahead.get(entry.request.handle, 0) + 1
        return counters

    def _per_row(self, batch: list[_Entry], values: list[int]) -> Tensor:
        spread = [value for entry, value in zip(batch, values, strict=True) for _ in range(entry.width)]
        return self._ports.sent(torch.tensor(spread, dtype=torch.int64))

    def _shares(
        self, batch: list[_Entry], outputs: dict[str, Tensor | list[Tensor | None]], rows: list[int]
    ) -> list[dict[str, Tensor]]:
        """What each job gets of a batch's outputs; a row without a port is a job without it."""
        shares: list[dict[str, Tensor]] = [{} for _ in batch]
        total = sum(rows)
        for port, value in outputs.items():
            if len(value) != total:
                raise EngineError(
                    f"node {self.name} gave {port!r} for {len(value)} rows of {total}",
                    "the first dimension of an output is the batch",
                    node=self.name,
                )
            # A view would keep the whole batch alive for as long as one request holds its row.
            is_kept_whole = total > 1 and isinstance(value, torch.Tensor) and port not in self._host_outputs
            each = value.unbind(0) if isinstance(value, torch.Tensor) else value
            start = 0
            for share, count in zip(shares, rows, strict=True):
                own = [row for row in each[start : start + count] if row is not None]
                if count > 1 and len(own) == count:
                    share[port] = torch.stack(own)
                elif count == 1 and own:
                    share[port] = own[0].clone() if is_kept_whole else own[0]
                start += count
        return shares

    def _settle(self, result: StepResult, entry: _Entry, outputs: dict[str, Tensor]) -> bool:
        """Report a firing. True when its loop goes on."""
        job, loop = entry.job, entry.job.loop
        kept = {port: outputs[port] for port in job.outputs if port in outputs}
        if loop is None:
            entry.request.held.update(kept)
            result.done.append(Done(job=job, outputs=kept))
            return False
        missing = sorted(set(loop.carry) - set(outputs))
        if missing:
            detail = "its loop carries that port"
            self._fail(
                result, entry, EngineError(f"node {self.name} did not give {missing[0]!r}", detail, node=self.name)
            )
            return False
        if loop.emit:
            values = {port: outputs[port] for port in loop.emit if port in outputs}
            result.emissions.append(Emission(job=job, iteration=entry.iteration, outputs=values))
        entry.iteration += 1
        entry.dealt |= frozenset(loop.carry.values()) if entry.width > 1 else frozenset()
        entry.carried = {into: outputs[port] for port, into in loop.carry.items()}
        is_stopped = loop.stop_port in outputs and stops(loop, outputs[loop.stop_port])
        if not is_stopped and entry.iteration < loop.max_iters:
            return True
        entry.request.held.update({port: outputs[port] for port in loop.carry})
        reason = "stop" if is_stopped else "length"
        result.done.append(Done(job=job, outputs=kept, reason=reason, iterations=entry.iteration))
        return False

    def _fail(self, result: StepResult, entry: _Entry, error: Exception) -> None:
        result.failed.append(Failed(job=entry.job, error=node_error(self.name, error)))
        entry.request.is_failed = True
        entry.request.queue.clear()

    def _tensor(self, name: str, value: Tensor | Number) -> Tensor:
        taken = self._ports.taken(name, value)
        return taken if isinstance(taken, torch.Tensor) else torch.tensor(taken)

    def _spread(self, entry: _Entry, inputs: Mapping[str, Tensor | Number]) -> None:
        """Find out which inputs hold a value for each row. Raises EngineError for one that fits neither way."""
        rows = entry.job.rows
        if rows == 1 or self._spec.per != "row":
            return
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        dealt = [name for name, value in tensors.items() if self._candidates.is_split(name, value, rows)]
        entry.dealt, entry.width = frozenset(dealt), rows if dealt else 1
