"""Unmasked passes of many tokens, such as steps of an image: dense attention over contiguous keys.

Copying the cached keys of such a pass costs little beside its attention, and PyTorch's kernels for contiguous keys can
run. New keys are read from the projections' output, so a pass may append or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.engine.transfers import upload

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.steps.attention import AttentionMetadata


MANY_TOKENS: Final = 2048
"""Fewest tokens of a pass for which PyTorch chooses the kernel. On Hopper it takes cuDNN's, which is 1.6 times as fast
as flash attention, but needs 40 to 60 ms for each new number of tokens or keys."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """Packed tokens of a pass, its cached tokens and their pages (int32)."""

    tokens: slice
    cached: int
    pages: Tensor


class WholePasses:
    """The KVView of unmasked passes. It appends nothing."""

    def __init__(self, pools: list[Tensor], page_size: int, metadata: AttentionMetadata) -> None:
        self._pools = pools
        self._page_size = page_size
        starts, device = metadata.query_starts.tolist(), pools[0].device
        sequences = zip(starts, starts[1:], metadata.page_rows.tolist(), metadata.lengths.tolist(), strict=False)
        self._passes = [
            _Pass(slice(start, end), length, upload(metadata.tables[row, : -(-length // page_size)], device))
            for start, end, row, length in sequences
        ]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        pool = self._pools[layer]
        parts = []
        for each in self._passes:
            own_key, own_value = key[each.tokens].to(pool.dtype), value[each.tokens].to(pool.dtype)
            if each.cached:
                own_key, own_value = self._with_cached(pool, each, own_key, own_value)
            own = (query[each.tokens].to(pool.dtype), own_key, own_value)
            q, k, v = (part.transpose(0, 1)[None] for part in own)
            parts.append(_dense(q, k, v, scale)[0].transpose(0, 1).to(query.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _with_cached(self, pool: Tensor, each: _Pass, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a pass, the cached ones first."""
        if pool.is_cuda:
            from mstar_core.engine.attention.kernels.page_copies import gather

            found = gather(pool, self._page_size, each.pages, each.cached, key, value)
            return found[0], found[1]
        held = pool.index_select(0, each.pages.long()).transpose(0, 1).flatten(1, 2)[:, : each.cached]
        return torch.cat([held[0], key]), torch.cat([held[1], value])


def _dense(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return attention without a mask. query: [1, heads, T, head_dim]; key, value: [1, kv_heads, keys, head_dim]."""
    if query.is_cuda and query.shape[2] < MANY_TOKENS:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
    return scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
