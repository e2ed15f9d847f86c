"""Sharding rules of tensor parallelism: the part of a tensor that one rank of a group keeps. For layers and weights.

A column-parallel linear layer keeps a part of its outputs, a row-parallel one a part of its inputs; the sum over the
ranks follows the second. Attention heads and the inner width of an MLP are such parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from mstar_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


class Collectives(Protocol):
    """Collective operations of one group. Every rank calls them in the same order."""

    def all_reduce(self, value: Tensor) -> Tensor:
        """Return the sum over the ranks. The argument may be overwritten."""

    def all_gather(self, value: Tensor) -> Tensor:
        """Return the values of all ranks, in their order, side by side: [n, k] -> [n, ranks * k]."""

    def exchange(self, value: Tensor) -> Tensor:
        """Send value[r] to rank r, and return what the ranks sent, in their order: [ranks, ...], contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Part of a stored tensor along one dimension, as ranges in ascending order. whole: stored length of it."""

    dim: int
    spans: tuple[range, ...]
    whole: int

    @classmethod
    def part(cls, dim: int, span: range, whole: int) -> Slice:
        """Return one range of a dimension."""
        return cls(dim=dim, spans=(span,), whole=whole)

    @property
    def count(self) -> int:
        """Length of the part."""
        return sum(len(span) for span in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The place of a rank in its tensor-parallel group. index: 0 .. size - 1; 0 is the leader."""

    index: int = 0
    size: int = 1
    collectives: Collectives | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the rank computes everything itself."""
        return self.size == 1

    def part(self, count: int, what: str) -> range:
        """Return this rank's part of `count` items. Raises ConfigError if the ranks cannot divide them evenly."""
        if count % self.size:
            raise ConfigError(
                f"tp_size {self.size} does not divide {count} {what}", hint="choose a divisor", key="tp_size"
            )
        each = count // self.size
        return range(self.index * each, (self.index + 1) * each)

    def kv_part(self, heads: int) -> range:
        """Return this rank's KV heads; ranks share a head if there are fewer heads than ranks. Raises ConfigError."""
        if heads < self.size and self.size % heads == 0:
            own = self.index * heads // self.size
            return range(own, own + 1)
        return self.part(heads, "KV heads")

    def rows(self, count: int) -> range:
        """Return this rank's rows of a vocabulary. The last rank may have fewer."""
        each = self.padded_rows(count)
        return range(min(self.index * each, count), min((self.index + 1) * each, count))

    def padded_rows(self, count: int) -> int:
        """Return the rows of a vocabulary that each rank has, padding included."""
        return -(-count // self.size)

    def reduce(self, value: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        return value if self.collectives is None else self.collectives.all_reduce(value)

    def gather(self, value: Tensor) -> Tensor:
        """Return the ranks' values side by side: [n, k] -> [n, ranks * k]."""
        return value if self.collectives is None else self.collectives.all_gather(value)

    def exchange(self, value: Tensor) -> Tensor:
        """Send value[r] to rank r, and return what the ranks sent, in their order: [ranks, ...], contiguous."""
        return value if self.collectives is None else self.collectives.exchange(value)


WHOLE: Final = Shard()
"""The place of a rank without tensor parallelism."""


def local_kv_heads(heads: int, size: int) -> int:
    """Return the KV heads of each rank of a group of `size`."""
    return max(1, heads // size)


def head_slices(
    shard: Shard, *, heads: int, kv_heads: int, head_dim: int, has_bias: bool = False, suffix: str = ""
) -> dict[str, Slice]:
    """Return the stored parts of the projections of an attention layer. heads, kv_heads: of all ranks together.

    Names are those of Llama, with the suffix behind `_proj`; has_bias: query, key and value projections have one.
    """
    if shard.is_whole:
        return {}
    queries = _spanned(shard.part(heads, "heads"), heads, head_dim)
    keys = _spanned(shard.kv_part(kv_heads), kv_heads, head_dim)
    parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    kinds = ("weight", "bias") if has_bias else ("weight",)
    found = {f"{name}{suffix}.{kind}": Slice.part(0, *part) for name, part in parts.items() for kind in kinds}
    return found | {f"o_proj{suffix}.weight": Slice.part(1, *queries)}


def _spanned(own: range, heads: int, head_dim: int) -> tuple[range, int]:
    """Return the rows of some heads, and the rows of all of them."""
    return range(own.start * head_dim, own.stop * head_dim), heads * head_dim


@runtime_checkable
class Sharded(Protocol):
    """A module whose parameters hold a part of the stored tensors."""

    def slices(self) -> Mapping[str, Slice]:
        """Return the stored part of each sharded parameter, by its name in the module. Empty if the module is whole."""


def module_slices(module: nn.Module) -> dict[str, Slice]:
    """Return the stored parts of all sharded parameters of a module, by name."""
    found: dict[str, Slice] = {}
    for prefix, layer in module.named_modules():
        if isinstance(layer, Sharded):
            found |= {f"{prefix}.{name}" if prefix else name: part for name, part in layer.slices().items()}
    return found
