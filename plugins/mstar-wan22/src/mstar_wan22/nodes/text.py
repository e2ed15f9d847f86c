"""UMT5 encoder: token ids to one vector per token. Names of parameters are those of the published files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import gelu

from mstar_core.engine.module import NodeModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from mstar_wan22.checkpoint.config import TextSizes


def bucket(distances: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each relative position, key index minus query index: int64, the same shape."""
    half = buckets // 2
    exact = half // 2
    far = distances.abs()
    scaled = torch.log(far.float().clamp(min=1) / exact) / math.log(max_distance / exact) * (half - exact)
    large = (exact + scaled.long()).clamp(max=half - 1)
    return (distances > 0).long() * half + torch.where(far < exact, far, large)


class RmsNorm(nn.Module):
    """RMS norm without mean, in float32, cast to the weights' dtype before the product."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)).to(x.dtype) * self.weight


class _TextAttention(nn.Module):
    """Attention with a bias table of its own. Scores are not scaled."""

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        inner = sizes.heads * sizes.head_dim
        self._sizes = sizes
        self.q, self.k, self.v = (nn.Linear(sizes.width, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, sizes.width, bias=False)
        self.relative_attention_bias = nn.Embedding(sizes.buckets, sizes.heads)

    def forward(self, x: Tensor, buckets: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (self._sizes.heads, -1)).transpose(0, 1) for each in (self.q, self.k, self.v))
        bias = self.relative_attention_bias(buckets).permute(2, 0, 1)
        weights = ((q @ k.transpose(1, 2)).float() + bias.float()).softmax(-1).to(v.dtype)
        out: Tensor = self.o((weights @ v).transpose(0, 1).flatten(1))
        return out


class _AttentionLayer(nn.Module):
    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.SelfAttention = _TextAttention(sizes)
        self.layer_norm = RmsNorm(sizes.width, sizes.eps)

    def forward(self, x: Tensor, buckets: Tensor) -> Tensor:
        out: Tensor = x + self.SelfAttention(self.layer_norm(x), buckets)
        return out


class _GatedMlp(nn.Module):
    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.wi_0, self.wi_1 = (nn.Linear(sizes.width, sizes.inner, bias=False) for _ in range(2))
        self.wo = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wo(gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x))
        return out


class _MlpLayer(nn.Module):
    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.DenseReluDense = _GatedMlp(sizes)
        self.layer_norm = RmsNorm(sizes.width, sizes.eps)

    def forward(self, x: Tensor, buckets: Tensor) -> Tensor:
        out: Tensor = x + self.DenseReluDense(self.layer_norm(x))
        return out


class _TextBlock(nn.Module):
    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.layer = nn.ModuleList([_AttentionLayer(sizes), _MlpLayer(sizes)])

    def forward(self, x: Tensor, buckets: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, buckets)
        return x


class _Stack(nn.Module):
    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.block = nn.ModuleList([_TextBlock(sizes) for _ in range(sizes.layers)])
        self.final_layer_norm = RmsNorm(sizes.width, sizes.eps)


class TextEncoder(nn.Module, NodeModule):
    """The node `text_encoder`. Texts are encoded one by one, so that none needs padding."""

    listed_ports = ("tokens",)

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self._sizes = sizes
        self.shared = nn.Embedding(sizes.vocab, sizes.width)
        self.encoder = _Stack(sizes)

    def forward(self, *, tokens: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Return {"text": B tensors [n, width]}. tokens: int64 [n] each."""
        return {"text": [self.encoded(ids)[-1] for ids in tokens]}

    def encoded(self, ids: Tensor) -> list[Tensor]:
        """Return the values behind each block, and last the result, [n, width] each."""
        places = torch.arange(len(ids), device=ids.device)
        buckets = bucket(places[None] - places[:, None], self._sizes.buckets, self._sizes.max_distance)
        x = self.shared(ids)
        values = []
        for block in self.encoder.block:
            x = block(x, buckets)
            values.append(x)
        return [*values, self.encoder.final_layer_norm(x)]
