"""Attentive pooling and class logits of classifier checkpoints. Run by the stateless engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from mstar_core.errors import EngineError
from mstar_vjepa2.nodes.blocks import Block, Mlp, attend_all

if TYPE_CHECKING:
    from torch import Tensor

RATIO: Final = 4
"""MLP ratio of the pooler, independent of the encoder's."""


class CrossAttention(nn.Module):
    """Cross-attention of one learned query over all tokens. It norms no query and has no output projection."""

    def __init__(self, width: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.layer_norm1 = nn.LayerNorm(width, eps)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.layer_norm2 = nn.LayerNorm(width, eps)
        self.mlp = Mlp(width, RATIO * width)

    def forward(self, query: Tensor, x: Tensor) -> Tensor:
        """Return [B, 1, width]. query: [B, 1, width]; x: [B, N, width]."""
        normed = self.layer_norm1(x)
        split = (
            part.unflatten(-1, (self.heads, -1))
            for part in (self.q_proj(query), self.k_proj(normed), self.v_proj(normed))
        )
        y = query + attend_all(*split).flatten(-2)
        out: Tensor = self.mlp(self.layer_norm2(y)).added(y)
        return out


class Pooler(nn.Module):
    """The node `pooler`: blocks without positions, the learned query, and a linear classifier."""

    def __init__(self, width: int, heads: int, layers: int, labels: int, eps: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, RATIO * width, eps) for _ in range(layers))
        self.query_tokens = nn.Parameter(torch.empty(1, 1, width))
        self.cross = CrossAttention(width, heads, eps)
        self.classifier = nn.Linear(width, labels) if labels else None

    def forward(self, *, encoder_hidden: Tensor) -> dict[str, Tensor]:
        """Return float32 pooled [B, width] and, with a head, logits [B, classes]. encoder_hidden: [B, N, width]."""
        x, branch = encoder_hidden, None
        for block in self.blocks:
            x, branch = block(x, branch, None)
        x = x if branch is None else branch.added(x)
        pooled = self.cross(self.query_tokens.expand(len(x), -1, -1), x)[:, 0]
        outputs = {"pooled": pooled.float()}
        if self.classifier is not None:
            outputs["logits"] = self.classifier(pooled).float()
        return outputs


class NoPooler(nn.Module):
    """The node `pooler` of a checkpoint without one. The processor refuses requests that need it."""

    def forward(self, *, encoder_hidden: Tensor) -> dict[str, Tensor]:
        """Raise EngineError."""
        raise EngineError(
            "this checkpoint has no pooler", hint="serve a classifier checkpoint, such as ssv2", node="pooler"
        )
