"""The stateless engine: a NodeRunner for nodes that keep nothing between firings. Used by the worker's loop.

Rows whose inputs agree in shape run together, the most urgent first. A request's own jobs keep their order.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.base import Done, Emission, Failed, Handle, MemoryUse, Pressure, StepResult
from mstar_core.engine.device import HostCopy
from mstar_core.engine.loop_rules import carried_values, stops
from mstar_core.engine.ports import keyword, names, takes
from mstar_core.engine.sampler import to_int64
from mstar_core.errors import EngineError, MstarError
from mstar_core.graph.nodes import STEP, PortType

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_core.engine.base import Job, Running, SamplingParams
    from mstar_core.engine.kv_step import Faults
    from mstar_core.graph.nodes import NodeSpec

SMALL: Final = 65536
"""Elements up to which an input stays on the host until its batch travels to a GPU together."""


@dataclass(slots=True)
class _Entry:
    """A job in the queue. carried: what a loop's next iteration takes in place of its inputs."""

    job: Job
    request: _Request
    order: int
    since: float
    inputs: dict[str, Tensor]
    carried: dict[str, Tensor] = field(default_factory=dict)
    iteration: int = 0

    @property
    def rank(self) -> tuple[float, int]:
        """Small goes first: urgency, then age."""
        return -self.job.urgency, self.order


@dataclass(slots=True)
class _Request:
    """What is known of a request here. fired: firings so far; held: what carried ports last held."""

    handle: Handle
    seed: int
    queue: deque[_Entry] = field(default_factory=deque)
    held: dict[str, Tensor] = field(default_factory=dict)
    fired: int = 0
    is_failed: bool = False


@dataclass(slots=True)
class StatelessRunning:
    """A step in flight; its outputs are on the device already or on their way. copies: those meant for the host."""

    result: StepResult
    started: float
    copies: list[HostCopy] = field(default_factory=list)


class StatelessEngine:
    """Runs one stateless node on one device. Owned by the worker; every call comes from its one thread.

    A module may name `host_ports`, inputs that it wants on the host, and `host_outputs`, outputs that leave the GPU in
    one copy per step.

    The module's forward gets each port stacked on a leading batch dimension: [B, ...] (numbers: [B]), or a list of B
    tensors for a port outside `spec.batch_key` whose shapes differ. It returns [B, ...] or a list of B per port. A
    forward that names `seeds` or `counters` gets them as int64 [B]: the request's seed, and how many firings of this
    node the request had before this one. A job of several rows brings them on its inputs' first axis; a node with
    `per="request"` gets them as one batch row, any other as that many.
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
        self._device = device
        self._dtype = dtype
        self._max_batch = max_batch
        self._lookahead = lookahead
        self._clock = clock
        self._faults = faults
        self._is_free = {
            name: PortType.parse(text).dtype in ("any", "bf16", "f16") for name, text in spec.ports.items()
        }
        self._takes_step = takes(module, keyword(STEP))
        self._wants_seeds = names(module, "seeds")
        self._wants_counters = names(module, "counters")
        self._host_ports: frozenset[str] = frozenset(getattr(module, "host_ports", ()))
        self._host_outputs: frozenset[str] = frozenset(getattr(module, "host_outputs", ()))
        self._copies: list[HostCopy] = []
        self._requests: dict[Handle, _Request] = {}
        self._in_flight: list[StatelessRunning] = []
        self._ready = StepResult()
        self._submitted = 0

    def open(self, handle: Handle, sampling: SamplingParams, max_tokens: int) -> None:
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
        entry = _Entry(job, request, self._submitted, self._clock(), {})
        try:
            entry.inputs = {name: self._on_device(name, value) for name, value in job.inputs.items()}
            self._check_rows(entry)
        except (MstarError, RuntimeError) as error:
            self._fail(self._ready, entry, error)
            return
        request.queue.append(entry)

    def fork(self, handle: Handle, source: str, into: str) -> None:
        """Nothing is kept, so there is nothing to fork."""

    def close(self, handle: Handle) -> None:
        """See NodeRunner."""
        self._requests.pop(handle, None)

    def pressure(self) -> Pressure:
        """See NodeRunner."""
        ready, oldest = len(self._ready.done) + len(self._ready.failed), float("inf")
        for request in self._requests.values():
            if request.queue:
                ready += len(request.queue)
                oldest = min(oldest, request.queue[0].since)
        if len(self._in_flight) > self._lookahead:
            return Pressure(waiting=ready)
        return Pressure(ready=ready, oldest_s=oldest)

    def launch(self) -> StatelessRunning | None:
        """See NodeRunner."""
        if len(self._in_flight) > self._lookahead:
            return None
        started = self._clock()
        batch = self._choose()
        result, self._ready = self._ready, StepResult()
        if not batch and not (result.done or result.failed):
            return None
        with torch.inference_mode():
            self._run(result, batch)
        running = StatelessRunning(result, started, self._copies)
        self._copies = []
        self._in_flight.append(running)
        return running

    def is_done(self, running: Running) -> bool:
        """See NodeRunner."""
        assert isinstance(running, StatelessRunning)
        return all(copy.is_done for copy in running.copies)

    def collect(self, running: Running) -> StepResult:
        """See NodeRunner. Steps must be collected in launch order."""
        assert isinstance(running, StatelessRunning) and self._in_flight and self._in_flight[0] is running
        self._in_flight.pop(0)
        for copy in running.copies:
            copy.wait()
        result = running.result
        result.done = [done for done in result.done if done.job.handle in self._requests]
        result.failed = [failed for failed in result.failed if failed.job.handle in self._requests]
        result.emissions = [item for item in result.emissions if item.job.handle in self._requests]
        result.duration_s = self._clock() - running.started
        return result

    def memory(self) -> MemoryUse:
        """See NodeRunner: nothing is held."""
        return MemoryUse()

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
            own = self._batch_key(entry)
            width = self._rows(entry)
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
        values = carried_values(loop, entry.inputs, entry.request.held, self.name)
        entry.carried = {into: self._on_device(into, value) for into, value in values.items()}
        start = {port: entry.carried[into] for port, into in loop.carry.items()}
        is_stopped = loop.stop_port in start and stops(loop, start[loop.stop_port])
        if not is_stopped and loop.max_iters > 0:
            return None
        kept = {port: value for port, value in start.items() if port in entry.job.outputs}
        return Done(job=entry.job, outputs=kept, reason="stop" if is_stopped else "length")

    def _ports(self, entry: _Entry) -> dict[str, Tensor]:
        """Inputs of the next firing of a job, with what its loop carries and counts."""
        if entry.job.loop is None:
            return entry.inputs
        ports = {**entry.inputs, **entry.carried}
        if STEP in entry.inputs or self._takes_step:
            ports[STEP] = torch.tensor(entry.iteration, dtype=torch.int64)
        return ports

    def _batch_key(self, entry: _Entry) -> tuple[object, ...]:
        named = self._spec.batch_key
        axis = 1 if self._rows(entry) > 1 else 0
        shapes = [
            (name, value.dtype, value.shape[axis:] if not named or name in named else None)
            for name, value in self._ports(entry).items()
        ]
        return tuple(sorted(shapes, key=lambda item: item[0]))

    def _rows(self, entry: _Entry) -> int:
        return entry.job.rows if self._spec.per == "row" else 1

    # -- running -----------------------------------------------------------------------------------------------------

    def _run(self, result: StepResult, batch: list[_Entry]) -> None:
        """Run a batch, and all iterations of its fused loops; others go back to the head of their queue."""
        going = batch
        while going:
            again = []
            for entry, outputs in self._isolated(result, going):
                if self._settle(result, entry, outputs):
                    again.append(entry)
            going = [entry for entry in again if entry.job.loop is not None and entry.job.loop.fused]
            for entry in again:
                if entry not in going:
                    entry.since = self._clock()
                    entry.request.queue.appendleft(entry)

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
        result.rows += sum(self._rows(entry) for entry in batch)
        return list(zip(batch, outputs, strict=True))

    def _forward(self, batch: list[_Entry]) -> list[dict[str, Tensor]]:
        if self._faults is not None:
            self._faults([entry.request.handle for entry in batch])
        given = [self._ports(entry) for entry in batch]
        ports: dict[str, object] = {
            keyword(name): self._stacked(batch, name, [each[name] for each in given]) for name in given[0]
        }
        if self._wants_seeds:
            ports["seeds"] = self._per_row(batch, [entry.request.seed for entry in batch])
        if self._wants_counters:
            ports["counters"] = self._per_row(batch, self._counters(batch))
        outputs = self._module(**ports)
        for port in self._host_outputs & set(outputs):
            value = outputs[port]
            if isinstance(value, torch.Tensor) and value.is_cuda:
                copy = HostCopy(value)
                self._copies.append(copy)
                outputs[port] = copy.pending
        return [self._share(batch, outputs, index) for index in range(len(batch))]

    def _counters(self, batch: list[_Entry]) -> list[int]:
        """Earlier firings of each job's request; jobs of one request count up within the batch."""
        ahead: dict[int, int] = {}
        counters = []
        for entry in batch:
            counters.append(entry.request.fired + ahead.get(entry.request.handle, 0))
            ahead[entry.request.handle] = ahead.get(entry.request.handle, 0) + 1
        return counters

    def _per_row(self, batch: list[_Entry], values: list[int]) -> Tensor:
        spread = [value for entry, value in zip(batch, values, strict=True) for _ in range(self._rows(entry))]
        return torch.tensor(spread, dtype=torch.int64, device=self._device)

    def _stacked(self, batch: list[_Entry], name: str, values: list[Tensor]) -> Tensor | list[Tensor]:
        rows: list[Tensor] = []
        for entry, value in zip(batch, values, strict=True):
            if self._rows(entry) == 1:
                rows.append(value)
            else:
                rows.extend(value.expand(entry.job.rows) if not value.dim() else value)
        if keyword(name) in self._host_ports or self._device.type == "cpu":
            return torch.stack(rows) if all(row.shape == rows[0].shape for row in rows) else rows
        # Rows that are on the host travel together: a copy each would cost more than the step.
        if any(row.device != rows[0].device for row in rows) or any(row.shape != rows[0].shape for row in rows):
            rows = [row.to(self._device) for row in rows]
        if all(row.shape == rows[0].shape for row in rows):
            return torch.stack(rows).to(self._device, non_blocking=True)
        return rows

    def _share(self, batch: list[_Entry], outputs: dict[str, Tensor | list[Tensor]], index: int) -> dict[str, Tensor]:
        start = sum(self._rows(entry) for entry in batch[:index])
        count = self._rows(batch[index])
        total = sum(self._rows(entry) for entry in batch)
        shares = {}
        for port, value in outputs.items():
            if len(value) != total:
                raise EngineError(
                    f"node {self.name} gave {port!r} for {len(value)} rows of {total}",
                    "the first dimension of an output is the batch",
                    node=self.name,
                )
            if count > 1:
                rows = value[start : start + count]
                shares[port] = rows.clone() if isinstance(rows, torch.Tensor) else torch.stack(list(rows))
            else:
                row = value[start]
                # A view would keep the whole batch alive for as long as one request holds its row.
                is_alone = total == 1 or not isinstance(value, torch.Tensor) or port in self._host_outputs
                shares[port] = row if is_alone else row.clone()
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
        entry.carried = {into: outputs[port] for port, into in loop.carry.items()}
        is_stopped = loop.stop_port in outputs and stops(loop, outputs[loop.stop_port])
        if not is_stopped and entry.iteration < loop.max_iters:
            return True
        entry.request.held.update({port: outputs[port] for port in loop.carry})
        reason = "stop" if is_stopped else "length"
        result.done.append(Done(job=job, outputs=kept, reason=reason, iterations=entry.iteration))
        return False

    def _fail(self, result: StepResult, entry: _Entry, error: Exception) -> None:
        if not isinstance(error, MstarError):
            detail = f"{type(error).__name__}: {error}"
            error = EngineError(f"node {self.name} failed on this request", detail, node=self.name)
        result.failed.append(Failed(job=entry.job, error=error))
        entry.request.is_failed = True
        entry.request.queue.clear()

    def _on_device(self, name: str, value: Tensor) -> Tensor:
        is_free = self._is_free.get(name, True)
        dtype = self._dtype if value.is_floating_point() and is_free else value.dtype
        if not value.is_cuda and (keyword(name) in self._host_ports or value.numel() <= SMALL):
            return value.to(dtype)
        return value.to(self._device, dtype)

    def _check_rows(self, entry: _Entry) -> None:
        rows = entry.job.rows
        for name, value in entry.inputs.items():
            if rows > 1 and value.dim() and value.shape[0] != rows:
                raise EngineError(
                    f"port {name!r} of node {self.name} does not hold one value per row",
                    f"{rows} rows, shape {list(value.shape)}",
                    node=self.name,
                )
