"""Captured prefill, one bucket per number of packed tokens: from prompt ids to first ids without a host decision.

A replay covers embedding, layers, the head on each prompt's last token, the draw and the update of the slots. Several
prompts share a bucket, prefill chunks and prompts that begin in the prefix cache included. Used by the model runner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.cuda_graphs.cache import Size, StaticStep
from mstar_core.engine.cuda_graphs.decode import up_to
from mstar_core.engine.sampling.columns import columns, states
from mstar_core.engine.sampling.columns import fields as column_fields
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
from mstar_core.layers import rng

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.staging import Staging
    from mstar_core.engine.cuda_graphs.cache import GraphCache
    from mstar_core.engine.cuda_graphs.decode import DecodeSteps
    from mstar_core.engine.kv.batch import ScheduledChunk

PREFILL: Final = b"prefill"
"""Kind of these steps on the wire."""

PREFILL_ADJUSTING: Final = b"prefill adjusting"
"""Kind of their variant that adjusts logits."""

FEWEST_PROMPTS: Final = 8
TOKENS_PER_PROMPT: Final = 32
"""A bucket takes one prompt per so many tokens, but at least FEWEST_PROMPTS."""


class PrefillStep(StaticStep["Tensor"]):
    """Prefill of up to `tokens` packed tokens. adjusting: the variant that adjusts logits before the draw."""

    def __init__(self, node: DecodeSteps, tokens: int, *, adjusting: bool = False) -> None:
        self._node = node
        self._adjusting = adjusting
        if adjusting:
            node.slots.device_counts()  # a capture must not allocate them
        prompts = prompts_of(tokens)
        self._prompts = prompts
        fields = {
            "ids": (torch.int64, tokens),
            "positions": (node.slots.position_dtype, tokens),
            "ends": (torch.int64, prompts),
            "chance": (torch.float64, prompts),
            "slots": (torch.int64, prompts),
            **column_fields(prompts, adjusting=adjusting),
        }
        shape = AttentionShape(
            sequences=prompts, tokens=tokens, pages=node.tables.ids.shape[1], causal=True, is_ragged=True
        )
        self.buffers = AttentionBuffers(node.attention.static(shape), node.slots.device, fields)
        self.load([])

    @property
    def inlets(self) -> Sequence[Staging | AttentionBuffers]:
        return (self.buffers,)

    def load(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Fill the buffers for these chunks. Chunks that do not sample draw into the spare slot."""
        slots, tables = self._node.slots, self._node.tables
        counts = np.array([chunk.count for chunk in chunks], dtype=np.int64)
        rows = np.array([chunk.branch.slot for chunk in chunks], dtype=np.int64)
        metadata = AttentionMetadata.of(rows, tables.length[rows], tables.ids, counts)
        starts = metadata.query_starts
        ids = np.zeros(starts[-1], dtype=np.int64)
        positions = np.zeros(starts[-1], dtype=slots.next_position.dtype)
        for start, chunk in zip(starts, chunks, strict=False):
            forward, end = chunk.forward, start + chunk.count
            ids[start:end] = forward.ports[self._node.id_port].narrow(0, forward.done, chunk.count).numpy()
            first = forward.position + forward.done
            positions[start:end] = first + np.arange(chunk.count)
        params = [slots.sampling[row] for row in rows]
        samples = np.array([chunk.samples for chunk in chunks], dtype=np.bool_)
        padded = np.full(self._prompts, slots.spare, dtype=np.int64)
        padded[: len(rows)] = np.where(samples, rows, slots.spare)
        values = {"ids": ids, "positions": positions, "ends": starts[1:] - 1, "slots": padded}
        values |= columns(params, self._prompts, adjusting=self._adjusting)
        values["chance"] = rng.uniform_host(states(params), slots.drawn[rows])
        self.buffers.prepare(metadata, values)

    def forward(self) -> Tensor:
        """Run the prefill. Returns drawn ids, int64 [prompts]."""
        node, own = self._node, self.buffers.device
        ports: dict[str, Tensor] = {node.id_port: own["ids"]}
        self.buffers.reset()
        hidden = node.module(kv=self.buffers.view, positions=own["positions"], **ports)["hidden"]
        self.buffers.reset()
        logits = node.module.head(hidden.index_select(0, own["ends"]))
        drawn = node.sampler.draw(logits, own, own["chance"], own["slots"])
        return node.sampler.store(own, own["slots"], drawn)


class PrefillSteps:
    """The captured prefill of one node. Owned by its `NodeGraphs`; draws as its decode steps do.

    adjusting: variants that adjust logits, captured on demand. A batch runs one if a prompt of it needs it.
    """

    def __init__(self, node: DecodeSteps, cache: GraphCache) -> None:
        self._node = node
        self.counts = cache.counts
        self.buckets = cache.buckets(
            lambda size: PrefillStep(node, size[0]),
            lambda size: f"prefill graph of {size[0]} tokens",
            lambda size: (0, -size[0]),
            PREFILL,
        )
        self.adjusting = cache.buckets(
            lambda size: PrefillStep(node, size[0], adjusting=True),
            lambda size: f"prefill graph of {size[0]} tokens that adjusts logits",
            lambda size: (0, -size[0]),
            PREFILL_ADJUSTING,
        )

    @property
    def sizes(self) -> list[int]:
        """Captured buckets, in packed tokens."""
        return [tokens for (tokens,) in self.buckets.sizes]

    def plan(self, sizes: Iterable[int], budget: int) -> None:
        """Queue captures. Of the sizes that the token budget cannot fill only the smallest is taken."""
        self.buckets.plan(up_to(budget, sizes, [*self.buckets.sizes, *self.buckets.planned]))

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest captured bucket, 0 without one."""
        return (self.buckets.largest or (0,))[0]

    @property
    def most_rows(self) -> int:
        """Prompts that the largest captured bucket takes, 0 without one."""
        return prompts_of(self.most_tokens) if self.most_tokens else 0

    def suits(self, chunk: ScheduledChunk) -> bool:
        """Return whether a bucket can run this chunk: causal ids that are appended, with no output but the id."""
        forward, job = chunk.forward, chunk.job
        if not forward.is_ids or forward.attend.mask != "causal" or forward.attend.positions != "running":
            return False
        if not forward.attend.write or chunk.wants or chunk.count > self.most_tokens:
            return False
        # A general loop keeps its drawn id on the device, where the next replay would overwrite it.
        if chunk.samples and job is not None and job.loop is not None:
            return False
        return self._has_bucket([chunk])

    def _adjusts(self, chunk: ScheduledChunk) -> bool:
        return chunk.samples and bool(self._node.slots.adjusts[chunk.branch.slot])

    def _size(self, chunks: Sequence[ScheduledChunk]) -> Size:
        """Return the size of the smallest bucket that holds these chunks."""
        tokens, count = sum(chunk.count for chunk in chunks), len(chunks)
        return next(size for size in self.buckets.sizes if size[0] >= tokens and prompts_of(size[0]) >= count)

    def _has_bucket(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Return whether a batch has a bucket. A variant that is missing is requested."""
        return not any(map(self._adjusts, chunks)) or self.adjusting.request(self._size(chunks))

    def batches(self, chunks: Sequence[ScheduledChunk]) -> list[list[ScheduledChunk]]:
        """Divide chunks, in order, into as few replays as the largest bucket allows.

        The scheduler offers what fits into one, so that at most two replays of a bucket wait on the device. Chunks that
        adjust logits run alone as long as the variant that would hold their batch is not captured.
        """
        divided = []
        for batch in self._packed(chunks):
            is_whole = self._has_bucket(batch)
            divided += [[chunk] for chunk in batch if not is_whole and self._adjusts(chunk)]
            others = [chunk for chunk in batch if is_whole or not self._adjusts(chunk)]
            divided += [others] if others else []
        return divided

    def _packed(self, chunks: Sequence[ScheduledChunk]) -> list[list[ScheduledChunk]]:
        """Divide chunks, in order, into batches that the largest bucket holds."""
        found: list[list[ScheduledChunk]] = []
        tokens = 0
        for chunk in chunks:
            if not found or tokens + chunk.count > self.most_tokens or len(found[-1]) == self.most_rows:
                found.append([])
                tokens = 0
            found[-1].append(chunk)
            tokens += chunk.count
        return found

    def run(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Run one batch. Returns int64 [prompts of the bucket]: the id of each chunk that samples, at its index.

        The next replay of any graph overwrites them.
        """
        buckets = self.adjusting if any(map(self._adjusts, chunks)) else self.buckets
        step = buckets[self._size(chunks)]
        step.load(chunks)
        self.counts.prefill_hits += 1
        return step.run()


def prompts_of(tokens: int) -> int:
    """Return the prompts that a bucket of so many tokens takes."""
    return max(FEWEST_PROMPTS, tokens // TOKENS_PER_PROMPT)
