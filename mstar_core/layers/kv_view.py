"""Interface between a KV module and its paged cache during one forward. Implemented by the attention backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

HeadNorms: TypeAlias = "tuple[Tensor, Tensor, float]"
"""RMSNorm of each head before rotation: weights of queries and of keys, [head_dim], and the epsilon."""


class KVView(Protocol):
    """The cache of the packed sequences of one step.

    A forward works on T packed tokens of all sequences. `attend` appends a layer's keys and values (after rotary) to
    the pages of each sequence, unless its pass only reads, and attends over everything that each token may see.
    """

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Return the attention of one layer.

        query: [T, heads, head_dim]; key, value: [T, kv_heads, head_dim]; scale: default head_dim ** -0.5.
        Returns [T, heads, head_dim] in the query's dtype.
        """


@runtime_checkable
class PackedView(KVView, Protocol):
    """A view that can also normalize, rotate and append the output of a joined projection, with the attention."""

    def attend_packed(
        self,
        layer: int,
        packed: Tensor,
        rotation: tuple[Tensor, Tensor],
        heads: int,
        scale: float | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor | None:
        """Normalize if `norms` are given, rotate, append and attend for one layer.

        packed: [T, (heads + 2 * kv_heads) * head_dim], queries first, then keys and values; or float32 slices of it
        to be summed, [S, T, ...]. rotation: cosine and sine, float32 [T, 1, head_dim].
        Returns [T, heads, head_dim] in the cache's dtype, or None if the view cannot: the caller then does each step.
        """


@runtime_checkable
class KeepingView(KVView, Protocol):
    """A view that can also append without attention, for a last layer whose output is not needed."""

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Append one layer's keys and values, [T, kv_heads, head_dim], the last two dimensions contiguous."""


class MemoryView(KeepingView, Protocol):
    """A view of a node with a memory, see `KVSpec.memory`."""

    def attend_cross(self, layer: int, query: Tensor, scale: float | None = None) -> Tensor:
        """Return the attention of one layer over the memory of each sequence, without a mask.

        query: [T, heads, head_dim]; the same shape is returned. scale: default head_dim ** -0.5.
        """


class DenseKernel(Protocol):
    """Attention kernel of one family for passes that append, without a mask within a sequence. A module may be one."""

    def supports(self, query: Tensor, pool: Tensor, tokens: int) -> bool:
        """Return whether the kernel takes such passes and is faster than the view's. tokens: of each sequence."""

    def splits_of(self, rows: int, tokens: int, heads: int) -> int:
        """Return the splits of the keys of so many sequences."""

    def descriptor_of(self, pool: Tensor) -> Any:
        """Return what `attend` needs of a pool; made once per layer."""

    def attend(
        self,
        query: Tensor,
        pool: Tensor,
        descriptor: Any,
        fields: Mapping[str, Tensor],
        factor: float,
        *,
        tokens: int,
        max_pages: int,
        splits: int,
    ) -> Tensor:
        """Return the attention, [T, heads, head_dim]. Arguments: see `split_kv.attend_split_kv` of the engine."""


@runtime_checkable
class PlacedView(KVView, Protocol):
    """A view whose callers may store keys and values by their own kernels."""

    def places(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's pool, as `make_pools` makes it, and the place of each token's key: int64 [T].

        A place is a line of the flat pool; the value goes one page later. -1: not stored.
        """

    def attend_placed(
        self, layer: int, query: Tensor, scale: float | None = None, kernel: DenseKernel | None = None
    ) -> Tensor:
        """Return the attention of one layer after they are stored. query: [T, heads, head_dim]; same shape.

        kernel: used where it supports the pass.
        """


@dataclass(frozen=True, slots=True)
class AppendOnlyView:
    """A KVView of passes that only fill the cache: a module may return once its last layer has appended to `inner`."""

    inner: KVView

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Attend through the inner view."""
        return self.inner.attend(layer, query, key, value, scale)


class KVModule(Protocol):
    """A module that the KV engine runs: one forward for single, batched, chunked and captured steps.

    forward(kv=..., positions=..., **ports) -> {"hidden": [T, width], ...}. Ids arrive packed as int64 [T] under
    `tokens` where the node has that port, else under the port it samples; `embeds`-like ports as [T, width];
    positions int64 [T], or float32 if the node declares a float `positions` port. Ports in `NodeSpec.row_ports`, and
    inputs of a fixed declared shape such as `i64[16]` that are not cut with the tokens, come as [batch items, ...] in
    token order (a list where shapes differ), and outputs among them are returned likewise; each candidate is a batch
    item. A special input `$step` arrives as `step`, `$param:x` as `x`, one value per token [T].
    In a resident loop with values per sequence (`graph.compile.resident`) T is the number of sequences. The sampled id
    arrives under its own port and the stream's item under its port, int64 [T]; state and inputs of shape s as [T, *s],
    `$param:x` as `x` [T], RANDOM as `random` float32 [T, *s]. New state is returned with one value per sequence. All
    sequences are computed in one forward; padding of captured steps has zeros for all of them.
    head(hidden [n, width], **head_ports) -> logits [n, vocab] of any float type, which are sampled as float32; for a
    node whose Sampling names a vocabulary [n, ids of it], in that order. Called on the tokens that need logits.
    What it may offer besides: see NodeModule of the engine.
    """

    def __call__(self, *, kv: KVView, positions: Tensor, **ports: Tensor | list[Tensor]) -> dict[str, Tensor]: ...

    def head(self, hidden: Tensor, **ports: Tensor) -> Tensor: ...
