"""Captured forwards of prompt passes with any inputs, one bucket per number of packed tokens: vectors of media, ids.

A replay covers the module's forward; the draw that may follow is launched after it. Passes on prefixes of any length
share a bucket, chunks included. Off unless `EngineHints.capture_prompts` names buckets. Used by the model runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.cuda_graphs.cache import Size, StaticStep, StepBuckets
from mstar_core.engine.cuda_graphs.decode import up_to
from mstar_core.engine.cuda_graphs.prefill import prompts_of
from mstar_core.engine.kv.batch import wanted_ports
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.attention.staging import Staging
    from mstar_core.engine.cache.page_table import PageTables
    from mstar_core.engine.cuda_graphs.cache import GraphCache
    from mstar_core.engine.kv.batch import PlainForward, ScheduledChunk
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule

MOST_KINDS: Final = 8
"""Kinds of prompt passes that a node captures; later ones run uncaptured and count as misses."""

MOST_SHORT: Final = 128
"""Buckets up to this size take passes of any fewer tokens: weights, not tokens, decide their time."""

ROWS: Final = (1, 2, 4, 8, 16, 32)
"""Sequences of the buckets of passes that have values per sequence and a fixed number of tokens each."""


@dataclass(frozen=True, slots=True)
class PromptForm:
    """An input. axis: of its tokens, None if it has one value per sequence, on axis 0. shape: without that axis."""

    name: str
    dtype: torch.dtype
    axis: int | None
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, value: Tensor, axis: int | None) -> PromptForm:
        """Return the form of a packed input."""
        shape = tuple(value.shape)
        return cls(name, value.dtype, axis, shape[: axis or 0] + shape[(axis or 0) + 1 :])

    def empty(self, count: int, device: torch.device) -> Tensor:
        """Return zeros for `count` tokens or sequences."""
        at = self.axis or 0
        return torch.zeros((*self.shape[:at], count, *self.shape[at:]), dtype=self.dtype, device=device)

    def part(self, whole: Tensor, count: int) -> Tensor:
        """Return the first `count` tokens or sequences."""
        return whole.narrow(self.axis or 0, 0, count)


@dataclass(frozen=True, slots=True)
class PromptKind:
    """Inputs that prompt passes of one graph share. row_tokens: of each sequence, 0 if any number."""

    ports: tuple[PromptForm, ...]
    positions: PromptForm
    row_tokens: int


class PromptStep(StaticStep[dict[str, "Tensor"]]):
    """Prompt passes of one kind: up to `tokens` packed tokens of up to `rows` sequences."""

    def __init__(
        self,
        module: KVModule,
        attention: AttentionBackend,
        tables: PageTables,
        kind: PromptKind,
        tokens: int,
        rows: int,
        inputs: dict[str, Tensor],
        device: torch.device,
    ) -> None:
        """inputs: of at least as many tokens, which other buckets share."""
        self.tokens, self.rows = tokens, rows
        self._module = module
        self._kind = kind
        shape = AttentionShape(sequences=rows, tokens=tokens, pages=tables.ids.shape[1], causal=True, is_ragged=True)
        self._buffers = AttentionBuffers(attention.static(shape), device)
        self._positions = kind.positions.empty(tokens, device)
        self._ports = {form.name: form.part(inputs[form.name], self._count(form)) for form in kind.ports}
        self._buffers.prepare(AttentionMetadata.empty(tables.ids))

    def _count(self, form: PromptForm) -> int:
        return self.rows if form.axis is None else self.tokens

    @property
    def inlets(self) -> Sequence[Staging | AttentionBuffers]:
        return (self._buffers,)

    def load(self, step: PlainForward) -> None:
        """Fill the buffers. Padding keeps what earlier passes left; it appends to the spare page only."""
        self._buffers.prepare(step.attention)
        tokens, sequences = step.attention.tokens, len(step.attention.page_rows)
        self._kind.positions.part(self._positions, tokens).copy_(step.positions)
        for form in self._kind.ports:
            given = step.ports[form.name]
            assert isinstance(given, torch.Tensor)
            form.part(self._ports[form.name], sequences if form.axis is None else tokens).copy_(given)

    def forward(self) -> dict[str, Tensor]:
        """Run the passes. Returns the module's outputs, packed."""
        self._buffers.reset()
        outputs = self._module(kv=self._buffers.view, positions=self._positions, **self._ports)
        self._buffers.reset()
        return outputs


class PromptSteps:
    """The captured prompt passes of one node. Owned by its `NodeGraphs`; the model runner replays them."""

    def __init__(
        self,
        spec: NodeSpec,
        module: KVModule,
        attention: AttentionBackend,
        tables: PageTables,
        cache: GraphCache,
        budget: int,
        *,
        counts_ids: bool,
    ) -> None:
        """counts_ids: whether prompts of ids are counted here, which is so if the node has no other prefill."""
        self.counts = cache.counts
        self._counts_ids = counts_ids
        self._sizes = [tokens for (tokens,) in up_to(budget, spec.hints.capture_prompts, [])]
        self._module = module
        self._attention = attention
        self._tables = tables
        self._cache = cache
        self._buckets: dict[PromptKind, StepBuckets[PromptStep]] = {}

    @property
    def kinds(self) -> dict[PromptKind, list[Size]]:
        """Captured buckets by kind: (tokens, sequences), ascending."""
        return {kind: buckets.sizes for kind, buckets in self._buckets.items()}

    def run(self, step: PlainForward, chunks: Sequence[ScheduledChunk]) -> dict[str, Tensor] | None:
        """Replay a forward. Returns its packed outputs, those that chunks want as copies; None if no bucket takes it.

        The next replay overwrites the other outputs. Kinds that have no buckets yet are queued for capture.
        """
        tokens = sum(chunk.count for chunk in chunks)
        kind = self._kind(step, chunks)
        found = None if kind is None else self._step(kind, tokens, len(chunks))
        if self._counts_ids or not chunks[0].forward.is_ids:
            self.counts.prefill_tokens += tokens
            self.counts.prefill_misses += found is None
        if found is None:
            return None
        self.counts.prefill_hits += 1
        found.load(step)
        wanted = wanted_ports(chunks)
        used = {found.rows: len(chunks), found.tokens: tokens}
        outputs = {name: value[: used.get(len(value))] for name, value in found.run().items()}
        return {name: value.clone() if name in wanted else value for name, value in outputs.items()}

    def owns(self, buckets: object) -> bool:
        """Return whether these are buckets of prompt passes."""
        return any(each is buckets for each in self._buckets.values())

    def _kind(self, step: PlainForward, chunks: Sequence[ScheduledChunk]) -> PromptKind | None:
        """Return the kind of a forward of causal passes that append, outside loops; None for any other."""
        if step.wants_logits or not all(_is_prompt(chunk) for chunk in chunks):
            return None
        first, forms = chunks[0].forward, []
        for name, axis in sorted(first.axes.items()):
            value, is_per_row = step.ports[name], name in first.per_row
            if not isinstance(value, torch.Tensor) or (axis is None and not is_per_row):
                return None
            forms.append(PromptForm.of(name, value, None if is_per_row else axis))
        row_tokens = first.tokens if first.per_row else 0
        if row_tokens and any(chunk.count != row_tokens for chunk in chunks):
            return None
        positions = PromptForm.of("positions", step.positions, step.positions.dim() - 1)
        return PromptKind(tuple(forms), positions, row_tokens)

    def _step(self, kind: PromptKind, tokens: int, rows: int) -> PromptStep | None:
        """Return the smallest bucket for these passes, None if more than a third of it would be padding."""
        if kind not in self._buckets:
            if len(self._buckets) < MOST_KINDS:
                self._learn(kind)
            return None
        buckets = self._buckets[kind]
        most = max(MOST_SHORT, tokens * 3 // 2)
        fits = (size for size in buckets.sizes if size[0] >= tokens and size[1] >= rows)
        found = min(fits, default=None)
        is_worth = found is not None and (found[0] <= most or kind.row_tokens)
        return buckets[found] if found is not None and is_worth else None

    def _learn(self, kind: PromptKind) -> None:
        """Queue the buckets of a new kind, the largest first: the others fit its memory."""
        device, inputs = self._cache.device, dict[str, "Tensor"]()
        sizes: list[Size] = [(tokens, prompts_of(tokens)) for tokens in self._sizes]
        if kind.row_tokens:
            sizes = [(rows * kind.row_tokens, rows) for rows in ROWS if rows * kind.row_tokens <= max(self._sizes)]

        def build(size: Size) -> PromptStep:
            if not inputs:
                most = max(sizes)
                inputs.update({form.name: form.empty(most[form.axis is None], device) for form in kind.ports})
            return PromptStep(self._module, self._attention, self._tables, kind, size[0], size[1], inputs, device)

        names = ", ".join(form.name for form in kind.ports)
        self._buckets[kind] = self._cache.buckets(
            build, lambda size: f"prompt graph of {size[0]} tokens ({names})", lambda size: (4, -size[0])
        )
        self._buckets[kind].plan(sizes)


def _is_prompt(chunk: ScheduledChunk) -> bool:
    """Return whether a chunk is of a causal pass that appends, outside loops."""
    forward, job = chunk.forward, chunk.job
    is_plain = forward.attend.mask == "causal" and forward.attend.write and forward.iterations == 1
    return is_plain and (job is None or job.loop is None)
