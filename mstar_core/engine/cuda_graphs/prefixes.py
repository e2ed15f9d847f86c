"""Captured prefixes, one bucket per number of packed tokens: whole unmasked passes on empty sequences, outside loops.

A replay takes passes of any lengths; padding reaches no page. The buckets of a kind share their large inputs, and small
ones travel with the attention metadata. Off unless `EngineHints.capture_tokens` names buckets. Used by the loop passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.attention.staging import host_array, port_field
from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.cuda_graphs.cache import StaticStep, StepBuckets
from mstar_core.engine.cuda_graphs.decode import up_to
from mstar_core.engine.cuda_graphs.kinds import WirePort, WirePrefix, dtype_name, dtype_of, encoded
from mstar_core.engine.kv.batch import pass_positions, wanted_ports
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
from mstar_core.engine.transfers import join

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.attention.staging import Staging
    from mstar_core.engine.cache.page_table import PageTables
    from mstar_core.engine.cuda_graphs.cache import GraphCache
    from mstar_core.engine.kv.batch import ScheduledChunk
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule

MOST_KINDS: Final = 2
"""Kinds of prefixes that a node captures; later ones run uncaptured and count as misses."""

FEWEST_PASSES: Final = 4
TOKENS_PER_PASS: Final = 128
"""A bucket takes one pass per so many tokens, but at least FEWEST_PASSES."""

PrefixKind = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
"""Inputs of a pass, by name: dtype and shape of one token's value."""


class PrefixStep(StaticStep[dict[str, "Tensor"]]):
    """Prefixes of up to `tokens` packed tokens."""

    def __init__(
        self,
        module: KVModule,
        attention: AttentionBackend,
        tables: PageTables,
        kind: PrefixKind,
        tokens: int,
        inputs: dict[str, Tensor],
        device: torch.device,
    ) -> None:
        """inputs: large ones, at least [tokens, ...], which other buckets share."""
        self._module = module
        self._tables = tables
        numbers = {port_field(name): (dtype, tokens) for name, dtype, shape in kind if not shape}
        own = {"positions": (torch.int64, tokens), **numbers}
        bucket = AttentionShape(sequences=passes_of(tokens), tokens=tokens, pages=0, is_ragged=True, is_fresh=True)
        self._buffers = AttentionBuffers(attention.static(bucket), device, own)
        self._ports = {name: value[:tokens] for name, value in inputs.items()}
        self._ports |= {name: self._buffers.device[port_field(name)] for name, _, shape in kind if not shape}
        self.load([])

    @property
    def inlets(self) -> Sequence[Staging | AttentionBuffers]:
        return (self._buffers,)

    def late_port(self, name: str) -> Tensor:
        return self._ports[name]

    def load(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Fill the buffers for these chunks; small host values in one copy."""
        counts = np.array([chunk.count for chunk in chunks], dtype=np.int64)
        rows = np.array([chunk.branch.slot for chunk in chunks], dtype=np.int64)
        metadata = AttentionMetadata.of(rows, np.zeros_like(counts), self._tables.ids, counts, causal=False)
        values = dict[str, np.ndarray]()
        late: list[tuple[str, list[Tensor], Tensor]] = []
        if chunks:
            values["positions"] = pass_positions([chunk.forward for chunk in chunks])
        for name, target in self._ports.items() if chunks else ():
            given, field = [chunk.forward.ports[name] for chunk in chunks], port_field(name)
            if field in self._buffers.device and all([value.is_cpu for value in given]):
                values[field] = host_array(torch.cat(given))
            else:
                late.append((name, given, target[: int(counts.sum())]))
        self._buffers.prepare(metadata, values)
        for name, given, target in late:  # after the copy, which clears the other fields
            join(given, target)
            if self.on_late is not None:
                self.on_late(name, target)

    def forward(self) -> dict[str, Tensor]:
        """Run the passes. Returns the module's outputs, packed."""
        return self._module(kv=self._buffers.view, positions=self._buffers.device["positions"], **self._ports)


class PrefixSteps:
    """The captured prefixes of one node. Owned by its loop passes."""

    def __init__(
        self,
        spec: NodeSpec,
        module: KVModule,
        attention: AttentionBackend,
        tables: PageTables,
        cache: GraphCache,
        budget: int,
    ) -> None:
        self._sizes = up_to(budget, spec.hints.capture_tokens, [])
        self._module = module
        self._attention = attention
        self._tables = tables
        self._cache = cache
        self._buckets: dict[PrefixKind, StepBuckets[PrefixStep]] = {}

    @property
    def sizes(self) -> list[int]:
        """Captured buckets, in packed tokens."""
        return sorted({tokens for buckets in self._buckets.values() for (tokens,) in buckets.sizes})

    def run(
        self, chunks: Sequence[ScheduledChunk]
    ) -> tuple[list[tuple[list[ScheduledChunk], dict[str, Tensor]]], list[ScheduledChunk]]:
        """Replay what buckets take. Returns batches with copies of their packed outputs, and the remaining chunks.

        Kinds that have no buckets yet are queued for capture. A prefix that no bucket took counts as a miss.
        """
        done: list[tuple[list[ScheduledChunk], dict[str, Tensor]]] = []
        rest: list[ScheduledChunk] = []
        by_kind: dict[PrefixKind, list[ScheduledChunk]] = {}
        for chunk in chunks:
            kind = self._kind(chunk)
            if kind is None:
                rest.append(chunk)
            else:
                by_kind.setdefault(kind, []).append(chunk)
        missed = False
        for kind, group in by_kind.items():
            self._learn(kind)
            for batch in self._batches(kind, group):
                step = self._step(kind, batch)
                if step is None:
                    rest += batch
                    missed = True
                else:
                    done.append((batch, _replay(step, batch)))
        self._cache.counts.hits += len(done)
        self._cache.counts.misses += missed
        return done, rest

    def _kind(self, chunk: ScheduledChunk) -> PrefixKind | None:
        """Return the kind of a pass that can be captured: whole, unmasked, first of its sequence, inputs per token."""
        forward = chunk.forward
        if not self._sizes or forward.is_ids or forward.given is not None or forward.per_row or chunk.samples:
            return None
        if forward.attend.mask != "full" or not forward.attend.write or forward.attend.positions != "running":
            return None
        if isinstance(forward.position, float):  # the buffers hold whole positions
            return None
        if chunk.count != forward.tokens or forward.iterations > 1 or int(self._tables.length[chunk.branch.slot]):
            return None
        found = []
        for name in sorted(forward.ports):
            value = forward.ports[name]
            if forward.axes[name] != 0 or value.shape[0] != forward.tokens:
                return None
            found.append((name, value.dtype, tuple(value.shape[1:])))
        return tuple(found)

    def _learn(self, kind: PrefixKind) -> None:
        """Queue the buckets of a new kind, the largest first: the others fit its memory."""
        if kind not in self._buckets and len(self._buckets) < MOST_KINDS:
            self.buckets_of(kind).plan(self._sizes)

    def buckets_of(self, kind: PrefixKind) -> StepBuckets[PrefixStep]:
        """Return the buckets of a kind; new ones are empty."""
        if kind in self._buckets:
            return self._buckets[kind]
        device, most, inputs = self._cache.device, max(self._sizes)[0], dict[str, "Tensor"]()

        def build(size: tuple[int, ...]) -> PrefixStep:
            if not inputs:
                for name, dtype, shape in kind:
                    if shape:
                        inputs[name] = torch.zeros((most, *shape), dtype=dtype, device=device)
            return PrefixStep(self._module, self._attention, self._tables, kind, size[0], inputs, device)

        self._buckets[kind] = self._cache.buckets(
            build,
            lambda size: f"prefix graph of {size[0]} tokens",
            lambda size: (3, -size[0]),
            encoded(WirePrefix(tuple(WirePort(name, dtype_name(dtype), shape) for name, dtype, shape in kind))),
        )
        return self._buckets[kind]

    def _batches(self, kind: PrefixKind, chunks: Sequence[ScheduledChunk]) -> list[list[ScheduledChunk]]:
        """Divide passes, in order, into as few replays as the largest bucket allows."""
        buckets = self._buckets.get(kind)
        largest = (buckets.largest if buckets is not None else None) or (0,)
        found: list[list[ScheduledChunk]] = []
        tokens = 0
        for chunk in chunks:
            if not found or tokens + chunk.count > largest[0] or len(found[-1]) == passes_of(largest[0]):
                found.append([])
                tokens = 0
            found[-1].append(chunk)
            tokens += chunk.count
        return found

    def _step(self, kind: PrefixKind, chunks: Sequence[ScheduledChunk]) -> PrefixStep | None:
        """Return the smallest bucket for these passes, None if more than a third of it would be padding."""
        buckets, tokens = self._buckets.get(kind), sum(chunk.count for chunk in chunks)
        sizes = buckets.sizes if buckets is not None else []
        fits = [size for size in sizes if tokens <= size[0] <= tokens * 3 // 2 and len(chunks) <= passes_of(size[0])]
        return buckets[min(fits)] if buckets is not None and fits else None


def kind_of(wire: WirePrefix) -> PrefixKind:
    """Return the kind that another rank has sent."""
    return tuple((port.name, dtype_of(port.dtype), port.shape) for port in wire.ports)


def _replay(step: PrefixStep, chunks: Sequence[ScheduledChunk]) -> dict[str, Tensor]:
    """Run one replay. Returns copies of the packed outputs that some chunk wants."""
    step.load(chunks)
    total, outputs = sum(chunk.count for chunk in chunks), step.run()
    wanted = wanted_ports(chunks)
    return {name: value[:total].clone() for name, value in outputs.items() if name in wanted}


def passes_of(tokens: int) -> int:
    """Return the passes that a bucket of so many tokens takes."""
    return max(FEWEST_PASSES, tokens // TOKENS_PER_PASS)
