"""LoRA adapters of a node's layers: stacks of their weights, and products of batches whose tokens use several of them.

The stacks have room for a fixed number of adapters of a fixed rank and never move, so captured steps read them by
address. Tokens without an adapter are not written to, so their bits do not depend on the adapters of others.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.errors import WeightsError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.parallel.shards import Slice
    from mstar_core.weights.adapter import Adapter, LowRank

LEAST_RANK: Final = 16
"""Least rank that the kernels multiply; smaller ranks are padded with zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """Room of a node for adapters. count: adapters at once. rank: the largest, a power of two from LEAST_RANK on."""

    count: int
    rank: int

    @classmethod
    def of(cls, count: int, rank: int) -> AdapterLimits:
        """Return the limits for so many adapters of at most this rank."""
        return cls(count=count, rank=max(LEAST_RANK, 1 << (rank - 1).bit_length()))


@dataclass(frozen=True, slots=True)
class AdapterBlocks:
    """The adapters of a forward's packed tokens, on its device.

    order: int32 [T], the tokens that have an adapter, sorted by it. blocks: int32 [B, 3], the row of an adapter in the
    stacks, and the first and the end of a span of `order` that uses it. Padding is an empty span.
    """

    order: Tensor
    blocks: Tensor

    def segments(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the row of each adapter with its tokens. Reads the blocks, so they must be on the host."""
        spans = dict[int, tuple[int, int]]()
        for row, first, end in self.blocks.tolist():
            if end > first:
                spans[row] = (spans[row][0] if row in spans else first, end)
        for row, (first, end) in spans.items():
            yield row, self.order[first:end].long()


@dataclass(slots=True)
class AdaptedProjections:
    """Projections of one input, with the adapters of each. Owned by their layer.

    names: of the projections, whose outputs follow each other. outputs: their numbers of outputs on this rank.
    down: [adapters, projections * rank, inputs]. up: [adapters, sum of outputs, rank], with the adapters' scales.
    cuts: the part of this rank by projection, for A if it divides the inputs, else for B.
    """

    bank: AdapterBank
    names: tuple[str, ...]
    outputs: tuple[int, ...]
    down: Tensor
    up: Tensor
    cuts: Mapping[str, Slice]

    @property
    def size_bytes(self) -> int:
        """Bytes of the stacks."""
        return sum(stack.numel() * stack.element_size() for stack in (self.down, self.up))

    def add(self, x: Tensor, out: Tensor, name: str | None = None) -> None:
        """Add the adapters' products to the outputs in place.

        x: [T, inputs]. out: [T, outputs] of all projections or of the one called `name`; or partial sums of them
        [S, T, outputs], of which the first is changed.
        """
        blocks = self.bank.blocks
        if blocks is None:
            return
        target = out[0] if out.dim() == 3 else out
        chosen = self.names if name is None else (name,)
        spans = [self._span(each) for each in chosen]
        if x.is_cuda:
            rank, first = self.bank.limits.rank, self.names.index(chosen[0])
            down = self.down[:, first * rank : (first + len(chosen)) * rank]
            up = self.up[:, spans[0].start : spans[-1].stop]
            importlib.import_module("mstar_core.layers.kernels.lora").add_adapted(
                x, target, down, up, tuple(len(span) for span in spans), blocks.order, blocks.blocks
            )
            return
        for row, tokens in blocks.segments():
            rows, first = x.index_select(0, tokens), 0
            for each, span in zip(chosen, spans, strict=True):
                hidden = rows @ self._down(row, each).T
                target[tokens, first : first + len(span)] += (hidden @ self.up[row, span.start : span.stop].T).to(
                    target.dtype
                )
                first += len(span)

    def load(self, row: int, name: str, weights: LowRank) -> None:
        """Store one projection of an adapter, of which this rank keeps its part."""
        cut, span, rank = self.cuts.get(name), self._span(name), weights.rank
        a, b = weights.a, weights.b.float() * weights.scale
        if cut is not None:
            a, b = (_part(a, cut), b) if cut.dim == 1 else (a, _part(b, cut))
        self._down(row, name)[:rank].copy_(a)
        self.up[row, span.start : span.stop, :rank].copy_(b)

    def whole_shape(self, name: str) -> tuple[int, int]:
        """Return the outputs and inputs of a projection in the checkpoint."""
        cut, sizes = self.cuts.get(name), [len(self._span(name)), self.down.shape[2]]
        if cut is not None:
            sizes[cut.dim] = cut.whole
        return sizes[0], sizes[1]

    def clear(self, row: int) -> None:
        """Make an adapter's row zero."""
        self.down[row].zero_()
        self.up[row].zero_()

    def _span(self, name: str) -> range:
        at = self.names.index(name)
        start = sum(self.outputs[:at])
        return range(start, start + self.outputs[at])

    def _down(self, row: int, name: str) -> Tensor:
        at, rank = self.names.index(name), self.bank.limits.rank
        return self.down[row, at * rank : (at + 1) * rank]


@dataclass(slots=True)
class AdapterBank:
    """The adapters of one node's module. Owned by its engine; its layers read `blocks` in each forward.

    layers: adapted projections by the path of their layer in the module. blocks: of the forward that runs, None for
    one without adapters.
    """

    limits: AdapterLimits
    layers: dict[str, list[AdaptedProjections]] = field(default_factory=dict)
    blocks: AdapterBlocks | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all stacks."""
        return sum(each.size_bytes for layer in self.layers.values() for each in layer)

    def stacks(self) -> Iterator[Tensor]:
        """Yield all stacks."""
        for each in (each for layer in self.layers.values() for each in layer):
            yield from (each.down, each.up)

    @contextmanager
    def applied(self, blocks: AdapterBlocks | None) -> Iterator[None]:
        """Apply adapters to the forwards of the block."""
        self.blocks = blocks
        try:
            yield
        finally:
            self.blocks = None

    def adapted(
        self,
        names: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        cuts: Mapping[str, Slice],
        like: Tensor,
    ) -> AdaptedProjections:
        """Make the stacks of projections of one input, in the dtype and on the device of `like`."""
        count, rank = self.limits.count, self.limits.rank
        dtype = torch.bfloat16 if like.element_size() == 1 else like.dtype  # quantized weights
        return AdaptedProjections(
            self,
            tuple(names),
            tuple(outputs),
            torch.zeros(count, len(names) * rank, inputs, dtype=dtype, device=like.device),
            torch.zeros(count, sum(outputs), rank, dtype=dtype, device=like.device),
            cuts,
        )

    def check(self, adapter: Adapter) -> None:
        """Raise WeightsError unless every projection of an adapter belongs to a layer here and has its shape."""
        title = f"the adapter {adapter.folder.name} does not fit this model"
        for path, weights in adapter.weights.items():
            layer, _, name = path.rpartition(".")
            found = self._projections(layer, name)
            if found is None:
                detail = f"it adapts {path}, and the model has no such projection that can be adapted"
                hint = did_you_mean(path, self._paths()) or "load an adapter of this base model"
                raise WeightsError(title, detail, hint, file=str(adapter.folder))
            outputs, inputs = found.whole_shape(name)
            if weights.b.shape[0] != outputs or weights.a.shape[1] != inputs:
                detail = (
                    f"its {path} is {weights.b.shape[0]} x {weights.a.shape[1]}, the model's is {outputs} x {inputs}"
                )
                raise WeightsError(title, detail, "load an adapter of this base model", file=str(adapter.folder))
            if weights.rank > self.limits.rank:
                raise WeightsError(
                    f"the adapter {adapter.folder.name} has rank {weights.rank}",
                    f"this deployment has room for rank {self.limits.rank}",
                    f"start it with --set lora.max_rank={weights.rank}",
                    file=str(adapter.folder),
                )

    def load(self, row: int, adapter: Adapter) -> None:
        """Store an adapter in a row, in place of another one. Raises WeightsError as `check` does."""
        self.check(adapter)
        self.clear(row)
        for path, weights in adapter.weights.items():
            layer, _, name = path.rpartition(".")
            found = self._projections(layer, name)
            assert found is not None, "`check` has found it"
            found.load(row, name, weights)

    def clear(self, row: int) -> None:
        """Make a row zero, so that it changes nothing."""
        for layer in self.layers.values():
            for each in layer:
                each.clear(row)

    def _projections(self, layer: str, name: str) -> AdaptedProjections | None:
        return next((each for each in self.layers.get(layer, ()) if name in each.names), None)

    def _paths(self) -> list[str]:
        return [f"{path}.{name}" for path, layer in self.layers.items() for each in layer for name in each.names]


def _part(value: Tensor, cut: Slice) -> Tensor:
    """Return the part of A or B that a cut of their product's weight keeps."""
    return torch.cat([value.narrow(cut.dim, span.start, len(span)) for span in cut.spans], dim=cut.dim)
