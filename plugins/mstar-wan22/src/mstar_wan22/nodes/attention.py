"""Attention over all tokens of a video, on one rank or divided over several by the exchange of tokens for heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.parallel.shards import Shard

FAST = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Kernels in order of preference for long sequences on a GPU."""


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q k / sqrt(head_dim)) v without a mask: [B, queries, heads, head_dim], as are q, k and v."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    if not q.is_cuda:
        return scaled_dot_product_attention(q, k, v).transpose(1, 2)
    with sdpa_kernel(list(FAST), set_priority=True):
        return scaled_dot_product_attention(q, k, v).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Heads:
    """Division of a video's tokens over ranks. Each rank has consecutive tokens, the last ones padding.

    For attention, ranks exchange their tokens of all heads for all tokens of their heads.
    """

    shard: Shard
    tokens: int
    heads: int

    @property
    def share(self) -> int:
        """Tokens of each rank, padding included."""
        return -(-self.tokens // self.shard.size)

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of [B, tokens, ...]: [B, share, ...]."""
        if self.shard.is_whole:
            return x
        missing = self.share * self.shard.size - self.tokens
        padded = torch.cat([x, x[:, :1].expand(-1, missing, *x.shape[2:])], dim=1) if missing else x
        return padded[:, self.shard.index * self.share : (self.shard.index + 1) * self.share].contiguous()

    def own_spans(self, spans: Sequence[int]) -> tuple[int, ...]:
        """Return how many of this rank's tokens belong to each group; padding belongs to the last one."""
        start = self.shard.index * self.share
        stop, counts, at = start + self.share, [], 0
        for number, span in enumerate(spans):
            end = stop if number == len(spans) - 1 else at + span
            counts.append(max(0, min(end, stop) - max(at, start)))
            at += span
        return tuple(counts)

    def gathered(self, x: Tensor) -> Tensor:
        """Return all tokens of this rank's heads, [B, tokens, heads / ranks, head_dim], from [B, share, heads, ...]."""
        if self.shard.is_whole:
            return x
        ranks = self.shard.size
        sent = x.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4).contiguous()  # [ranks, share, B, heads / ranks, dim]
        return self.shard.exchange(sent).flatten(0, 1)[: self.tokens].transpose(0, 1)

    def scattered(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of all heads. The inverse of `gathered`."""
        if self.shard.is_whole:
            return x
        ranks = self.shard.size
        padded = pad(x.transpose(0, 1), (0, 0, 0, 0, 0, 0, 0, self.share * ranks - self.tokens))
        received = self.shard.exchange(padded.unflatten(0, (ranks, self.share)).contiguous())
        return received.permute(2, 1, 0, 3, 4).flatten(2, 3)  # [B, share, heads, dim]

    def all_tokens(self, x: Tensor) -> Tensor:
        """Return the tokens of all ranks, on each of them: [B, tokens, width] from [B, share, width]."""
        if self.shard.is_whole:
            return x
        sent = x[None].expand(self.shard.size, *x.shape).contiguous()
        return self.shard.exchange(sent).transpose(0, 1).flatten(1, 2)[:, : self.tokens]
