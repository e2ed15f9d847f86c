"""What a KV module sees of the cache during one forward. Made by the KV engine, used by `mstar_core.layers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


class KVView(Protocol):
    """The cache of the packed rows of one step.

    A forward works on T packed tokens of all rows of the step. `attend` appends this layer's keys and values
    (after rotary) to each row's pages, unless the row only reads, and attends over everything the row may see.
    """

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Attention of one layer.

        query: [T, heads, head_dim]; key, value: [T, kv_heads, head_dim]; scale: default head_dim ** -0.5.
        Returns [T, heads, head_dim] in the query's dtype.
        """


@runtime_checkable
class PackedView(KVView, Protocol):
    """A view that can also rotate and append what a joined projection gave, in one kernel with the attention."""

    def attend_packed(
        self, layer: int, packed: Tensor, rotation: tuple[Tensor, Tensor], heads: int, scale: float | None = None
    ) -> Tensor | None:
        """Rotation, append and attention of one layer.

        packed: [T, (heads + 2 * kv_heads) * head_dim], queries first, then keys and values; or float32 slices of it
        to be summed, [S, T, ...]. rotation: cosine and sine, float32 [T, 1, head_dim].
        Returns [T, heads, head_dim] in the cache's dtype, or None where this view cannot: then the caller takes apart.
        """


@runtime_checkable
class KeepingView(KVView, Protocol):
    """A view that can also append alone, for a last layer of which nothing but the cache is wanted."""

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Append one layer's keys and values, [T, kv_heads, head_dim], the last two dimensions contiguous."""


@runtime_checkable
class PlacedView(KVView, Protocol):
    """A view over pages whose callers may store this pass's keys and values by kernels of their own."""

    def places(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's pool, as `make_pools` makes it, and where each token's key goes: int64 [T].

        A place is a line of the flat pool, the value's one page later; -1: nowhere.
        """

    def attend_placed(self, layer: int, query: Tensor, scale: float | None = None) -> Tensor:
        """Attention of one layer once they are there. query: [T, heads, head_dim]. Returns the same shape."""


@runtime_checkable
class SilentView(KVView, Protocol):
    """A view of passes of which nothing but the cache is wanted: a module may end when its last layer has appended."""

    @property
    def inner(self) -> KVView:
        """The view that does the work."""


class KVModule(Protocol):
    """What the KV engine runs. One forward for single, batched, chunked and captured steps.

    forward(kv=..., positions=..., **ports) -> {"hidden": [T, width], ...}. Ids arrive packed as int64 [T] under
    `tokens` where the node has that port, else under the port it samples; `embeds`-like ports as [T, width];
    positions int64 [T]. Ports in `NodeSpec.row_ports` come as [rows of the step, ...] in token order (a list of rows
    where their shapes differ), and outputs among them are given likewise; a job of several rows is so many rows of a
    step. A special input `$step` arrives as `step`, `$param:x` as `x`, one value per token [T].
    head(hidden [n, width]) -> logits [n, vocab] of any float type, which are sampled as float32; for a node whose
    Sampling names a vocabulary [n, ids of it], in that order. Called by the engine on the rows that need logits.
    host_outputs, streamed_outputs (optional): loop outputs that are copied to the host; see KVCacheEngine.
    """

    def __call__(self, *, kv: KVView, positions: Tensor, **ports: Tensor | list[Tensor]) -> dict[str, Tensor]: ...

    def head(self, hidden: Tensor) -> Tensor: ...
