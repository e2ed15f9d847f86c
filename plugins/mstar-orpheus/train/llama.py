"""The language model for training: Llama with the official names of weights, over packed rows of several sentences."""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import vocabulary

WIDTH: Final = 192
LAYERS: Final = 6
HEADS, KV_HEADS, HEAD_DIM = 3, 1, 64
"""Three query heads per key head of 64, which the attention kernels of GPUs support."""
MLP: Final = 320
ROPE_BASE: Final = 10000.0
EPS: Final = 1e-5
POSITIONS: Final = 2048


class RMSNorm(nn.Module):
    """Root-mean-square norm with statistics in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (WIDTH,), self.weight, EPS).to(x.dtype)


class Attention(nn.Module):
    """Attention with grouped key heads and rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (
            project(x).view(rows, length, -1, HEAD_DIM).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotated(query, *rotation), rotated(key, *rotation)
        key, value = (each.expand(-1, HEADS, -1, -1) for each in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        y: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return y


class Mlp(nn.Module):
    """Gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, MLP, bias=False)
        self.up_proj = nn.Linear(WIDTH, MLP, bias=False)
        self.down_proj = nn.Linear(MLP, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, mask)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Decoder(nn.Module):
    """Ids to normalized hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary.SIZE, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = RMSNorm()

    def forward(self, ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        rotation = angles(positions)
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        mask = (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        for layer in self.layers:
            x = layer(x, rotation, mask)
        y: Tensor = self.norm(x)
        return y


class Llama(nn.Module):
    """Ids to the loss of the ids that follow. The head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                inner = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.05 if "embed" in name else 1 / math.sqrt(weight.shape[1])
                nn.init.normal_(weight, std=scale / (math.sqrt(2 * LAYERS) if inner else 1))

    def forward(self, ids: Tensor, positions: Tensor, documents: Tensor, targets: Tensor, z: float) -> Tensor:
        """Return the loss per id, with z * log(Z)^2. All int64 [B, T]; targets: -100 where nothing is predicted."""
        logits = self.logits(ids, positions, documents).float().flatten(0, 1)
        flat = targets.flatten()
        total = torch.logsumexp(logits, 1)
        chosen = logits.gather(1, flat.clamp(min=0)[:, None])[:, 0]
        wanted = (flat >= 0).float()
        loss: Tensor = ((total - chosen + z * total.square()) * wanted).sum() / wanted.sum().clamp(min=1)
        return loss

    def logits(self, ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        """Return logits [B, T, vocabulary]."""
        return F.linear(self.model(ids, positions, documents), self.model.embed_tokens.weight)


def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [B, 1, T, HEAD_DIM]. positions: int64 [B, T]."""
    steps = torch.arange(0, HEAD_DIM, 2, device=positions.device, dtype=torch.float32) / HEAD_DIM
    angle = positions[:, None, :, None].float() * ROPE_BASE**-steps
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
