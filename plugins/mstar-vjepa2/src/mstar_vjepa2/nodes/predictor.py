"""The masked predictor: encoder features at target ids from those at context ids. Run by the stateless engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from mstar_core.engine.module import NodeModule
from mstar_vjepa2.nodes.blocks import stack, sum_norm
from mstar_vjepa2.nodes.rotary import Rotary3D

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.compilation import Compiling
    from mstar_vjepa2.checkpoint.config import BaseConfig

MASK_INDEX: Final = 1
"""Index of the mask vector for unknown patches, modulo their number."""


class MaskedPredictor(nn.Module, NodeModule):
    """The node `predictor`. Tokens carry their ids and attention has no order, so nothing is sorted."""

    def __init__(self, config: BaseConfig) -> None:
        super().__init__()
        sizes, width = config.predictor, config.encoder.vit.width
        self.grid = config.encoder.grid
        self.embed = nn.Linear(width, sizes.width)
        self.mask_tokens = nn.Parameter(torch.empty(config.mask_tokens, 1, 1, sizes.width))
        self.blocks = stack(sizes)
        self.norm = nn.LayerNorm(sizes.width, sizes.eps)
        self.proj = nn.Linear(sizes.width, width)
        self.rotary = Rotary3D(sizes.width // sizes.heads)

    def forward(self, *, encoder_hidden: Tensor, context_mask: Tensor, target_mask: Tensor) -> dict[str, Tensor]:
        """Predict a batch.

        encoder_hidden: [B, N, width]; context_mask: int64 [B, c], ids below N; target_mask: int64 [B, t], ids that may
        be past the clip. Returns predicted_hidden float32 [B, t, width], not normed, and window [B, N, width]: the
        input without its oldest t vectors, followed by the predicted ones.
        """
        predicted = self.predict(gathered(encoder_hidden, context_mask), context_mask, target_mask)
        window = torch.cat([encoder_hidden, predicted.to(encoder_hidden.dtype)], dim=1)[:, -encoder_hidden.shape[1] :]
        return {"predicted_hidden": predicted.float(), "window": window}

    def trace(self, compiling: Compiling) -> None:
        """Run the kernels of one prediction."""
        self.warm_up()

    def warm_up(self) -> None:
        """Predict one latent frame from itself, so that kernels are compiled and loaded before the first request."""
        ids = torch.arange(self.grid**2, device=self.mask_tokens.device)[None]
        hidden = torch.zeros(1, ids.shape[1], self.embed.in_features, dtype=self.embed.weight.dtype, device=ids.device)
        self.forward(encoder_hidden=hidden, context_mask=ids, target_mask=ids)

    def predict(self, context: Tensor, context_ids: Tensor, target_ids: Tensor) -> Tensor:
        """Return the vectors at the target ids, [B, t, width]. context: [B, c, width], vectors at the context ids."""
        known = self.embed(context)
        mask = self.mask_tokens[MASK_INDEX % len(self.mask_tokens)].to(known.dtype)
        x = torch.cat([known, mask.expand(*target_ids.shape, -1)], dim=1)
        rotation = self.rotary.of_ids(torch.cat([context_ids, target_ids], dim=1), self.grid, self.grid)
        branch = None
        for block in self.blocks:
            x, branch = block(x, branch, rotation)
        _, normed = sum_norm(x, branch, self.norm)
        out: Tensor = self.proj(normed[:, -target_ids.shape[1] :])
        return out


def gathered(hidden: Tensor, ids: Tensor) -> Tensor:
    """Return the vectors at the ids, [B, k, width]. hidden: [B, N, width], ids: int64 [B, k]."""
    return hidden.gather(1, ids[..., None].expand(-1, -1, hidden.shape[-1]))
