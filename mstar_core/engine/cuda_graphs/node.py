"""All captured steps of one node: which buckets come before the first request, which in idle moments, and the counts.

Used by the KV engine, which calls it when nothing of the node is in flight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mstar_core.engine.cuda_graphs.buckets import Buckets, Captures
from mstar_core.engine.cuda_graphs.decode import DecodeGraphs
from mstar_core.engine.cuda_graphs.prefill import PrefillGraphs
from mstar_core.errors import StartError

if TYPE_CHECKING:
    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.cache.page_table import PageTables
    from mstar_core.engine.cache.slots import Slots
    from mstar_core.engine.kv.model_runner import ModelRunner
    from mstar_core.graph.spec.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule

log = logging.getLogger(__name__)


class NodeGraphs:
    """The decode and the prompt graphs of one node. Owned by its KV engine; the step runner replays them."""

    def __init__(
        self, spec: NodeSpec, module: KVModule, attention: AttentionBackend, slots: Slots, tables: PageTables,
        *, id_port: str, vocab: int, token_budget: int, report: Callable[[str, str], None] | None = None,
    ) -> None:  # fmt: skip
        captures = self._captures = Captures(slots.device, report)
        self._name = spec.name
        self._budget = token_budget
        self.decode = DecodeGraphs(
            spec, module, attention.fixed_rows, slots, tables, id_port=id_port, vocab=vocab, captures=captures
        )
        self.prompts = PrefillGraphs(
            spec, module, attention.fixed_segments, slots, tables, id_port=id_port, decode=self.decode,
            captures=captures,
        )  # fmt: skip
        self.counts = captures.counts

    def capture(self, buckets: Buckets, runner: ModelRunner) -> None:
        """Capture what is wanted before the first request, give it to the runner, and note the rest.

        Raises StartError, naming what did not fit, when the device's memory does not suffice.
        """
        self.decode.plan(buckets.decode)
        self.prompts.plan(buckets.prefill, self._budget)
        try:
            while not self.is_complete:
                self.decode.capture_next()
                self.prompts.capture_next()
        except torch.OutOfMemoryError as error:
            raise StartError(
                f"the captured steps of node {self._name} do not fit",
                str(error).splitlines()[0],
                "lower kv_cache.memory_fraction, max_concurrent_requests or token_budget",
                phase="kernels",
            ) from error
        self.decode.plan(buckets.decode_later)
        self.prompts.plan(buckets.prefill_later, self._budget)
        self._compile_later()
        self._captures.report = None  # what is captured later is no part of the start
        runner.graphs, runner.prompts = self.decode, self.prompts

    def _compile_later(self) -> None:
        """Compile what the later captures need: a request that meets one waits for tens of milliseconds, not seconds.

        What does not fit now may fit later, or is left out then: it fails no start.
        """
        try:
            with torch.inference_mode(), self._captures.compiling("steps that are captured later"):
                self.decode.compile_later()
                self.prompts.compile_later()
        except torch.OutOfMemoryError as error:
            log.warning("node %s: not every later step was tried: %s", self._name, str(error).splitlines()[0])

    @property
    def is_complete(self) -> bool:
        """Whether every planned bucket is there."""
        return self.decode.is_complete and self.prompts.is_complete

    def capture_next(self) -> bool:
        """Capture one bucket that is still missing. True when more are left.

        One that does not fit any more is left out and said to be: the next larger serves, else the plain step.
        """
        try:
            if not self.prompts.is_complete:
                self.prompts.capture_next()
            else:
                self.decode.capture_next()
        except torch.OutOfMemoryError as error:
            log.error("node %s goes on without a bucket: %s", self._name, str(error).splitlines()[0])
        return not self.is_complete

    def counters(self) -> dict[str, float]:
        """What captured steps did since the start, by name.

        The share of replayed steps is graph_hits / (graph_hits + graph_misses), and so for prompts. graph_bytes:
        device memory that went with the graphs; replans: attention plans that decode steps made again.
        """
        counts = self.counts
        return {
            "graph_hits": float(counts.hits),
            "graph_misses": float(counts.misses),
            "prefill_hits": float(counts.prefill_hits),
            "prefill_misses": float(counts.prefill_misses),
            "prefill_tokens": float(counts.prefill_tokens),
            "graphs_captured": float(counts.captured),
            "graph_capture_s": counts.capture_s,
            "graph_bytes": float(counts.bytes),
            "replans": float(self.decode.replans),
        }
