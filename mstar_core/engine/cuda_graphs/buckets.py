"""What the captured steps of a node share: their buckets, one memory pool, their counts. Used by the step's graphs."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch

from mstar_core.engine.sampling import rng, sampler

if TYPE_CHECKING:
    from mstar_core.engine.base import SamplingParams

log = logging.getLogger(__name__)

WARM_UPS: Final = 2

T = TypeVar("T")

PARAMETERS: Final = {
    "slots": torch.int64,
    "top_p": torch.float64,
    "temperature": torch.float32,
    "penalty": torch.float32,
    "greedy": torch.bool,
}
"""What a draw reads of each row, in the order in which a step's staging holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Sizes to capture: rows of decode steps, packed tokens of prompts. The later ones are captured while idle."""

    decode: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()
    decode_later: tuple[int, ...] = ()
    prefill_later: tuple[int, ...] = ()


@dataclass(slots=True)
class GraphCounts:
    """hits, misses: decode steps that were replayed, and those that no graph could take.

    prefill_hits, prefill_misses: the same for packed prompts, prefill_tokens: tokens of both. captured: graphs made;
    capture_s: time that capturing took; bytes: device memory that went with it, buffers included.
    """

    hits: int = 0
    misses: int = 0
    prefill_hits: int = 0
    prefill_misses: int = 0
    prefill_tokens: int = 0
    captured: int = 0
    capture_s: float = 0.0
    bytes: int = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Whatever happens inside does not count."""
        before = replace(self)
        try:
            yield
        finally:
            for each in fields(self):
                setattr(self, each.name, getattr(before, each.name))

    def as_counters(self) -> dict[str, float]:
        """Counters of a node without prompts. graph_misses: steps that no graph took, or not all of."""
        return {
            "graph_hits": float(self.hits),
            "graph_misses": float(self.misses),
            "graphs_captured": float(self.captured),
            "graph_capture_s": self.capture_s,
            "graph_bytes": float(self.bytes),
        }


@contextmanager
def recording(pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what the block launches. pool: memory that graphs share, as `CUDAGraph.pool` gives it; None: a new one.

    Nothing but the block may touch the device while it is captured: a graph of a node that has gone, whose cycle the
    interpreter happened to collect just then, ended the capture. Calls of other threads are no part of it.
    """
    graph, was_on = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield graph
    finally:
        if was_on:
            gc.enable()


class Captures:
    """Makes the graphs of one node in one memory pool. Shared by its decode and prefill graphs.

    On the CPU nothing is captured: a graph is None there, and the caller runs its step as it is.
    spare_bytes: device memory that the largest steps need: what would leave less of it free is not captured.
    report: called with `kernels` before a step first runs, which loads and compiles, and with `capture` before it is
    captured, each with what it is; None once the engine serves.
    """

    def __init__(
        self, device: torch.device, report: Callable[[str, str], None] | None = None, spare_bytes: int = 0
    ) -> None:
        self.device = device
        self._spare_bytes = spare_bytes
        self._pool: Any = None
        self._name = ""
        self.report = report
        self.counts = GraphCounts()

    def measured(self, name: str, make: Callable[[], None]) -> None:
        """Do what makes a graph with its buffers; log and count its time and its memory.

        Raises OutOfMemoryError where that memory is kept for steps, or is not there.
        """
        started, before, self._name = time.monotonic(), self._free(), name
        if self.device.type == "cuda" and before < self._spare_bytes:
            free, spare = before >> 20, self._spare_bytes >> 20
            raise torch.OutOfMemoryError(f"{free} MiB are free, and the largest steps may take {spare} MiB of it")
        self._tell("kernels")
        make()
        taken, size = time.monotonic() - started, max(0, before - self._free())
        self.counts.captured += 1
        self.counts.capture_s += taken
        self.counts.bytes += size
        log.info("%s: %.2f s, %.0f MiB", name, taken, size / (1 << 20))

    @contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Around steps that are run to be compiled, and for nothing else."""
        started, self._name = time.monotonic(), name
        self._tell("kernels")
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        log.info("%s: %.2f s", name, time.monotonic() - started)

    def graph(self, step: Callable[[], T]) -> tuple[Any, T | None]:
        """Capture a step: the graph and what a replay leaves behind. (None, None) on the CPU."""
        if self.device.type != "cuda":
            return None, None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._tell("capture")
        with recording(self._pool) as graph:
            drawn = step()
        self._pool = self._pool or graph.pool()
        return graph, drawn

    def _tell(self, phase: str) -> None:
        if self.report is not None:
            self.report(phase, self._name)

    def _free(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.empty_cache()  # what only the allocator keeps is free
        return int(torch.cuda.mem_get_info(self.device)[0])


def parameter_fields(rows: int) -> dict[str, tuple[torch.dtype, int]]:
    """Fields of a staging block for the draw of so many rows."""
    return {name: (dtype, rows) for name, dtype in PARAMETERS.items()}


def fill_parameters(
    host: dict[str, np.ndarray], slots: np.ndarray, chosen: Sequence[SamplingParams], spare: int
) -> np.ndarray:
    """Write the rows' parameters; what is left of the buffers draws the arg-max into the spare slot.

    slots: int64 [n]; chosen: their n parameters. Returns the states of their seeds, int64 [n].
    """
    count = len(chosen)
    host["slots"][:count], host["slots"][count:] = slots, spare
    host["top_p"][:] = 2.0
    host["top_p"][:count] = [2.0 if each.top_p >= 1 else each.top_p for each in chosen]
    host["temperature"][:] = 1.0
    host["temperature"][:count] = [1.0 if each.temperature <= 0 else each.temperature for each in chosen]
    host["penalty"][:] = 1.0
    host["penalty"][:count] = [each.repetition_penalty for each in chosen]
    host["greedy"][:] = True
    host["greedy"][:count] = [each.temperature <= 0 for each in chosen]
    return rng.seeded_host(np.array([sampler.to_int64(each.seed) for each in chosen], dtype=np.int64))
