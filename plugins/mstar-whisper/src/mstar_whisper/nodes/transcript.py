"""The transcript of a window: hands ids and their record to the client. See `text.record` for the record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor


class Transcript(nn.Module):
    """Joins the parts of a record."""

    def forward(
        self,
        *,
        ids: Tensor | list[Tensor],
        record: Tensor | list[Tensor],
        weights: Tensor | list[Tensor] | None = None,
    ) -> dict[str, list[Tensor]]:
        """Return {"text": ids each, "segments": float32 [numbers] each}. weights: [ids, states] each."""
        parts = zip(ids, record, weights if weights is not None else [None] * len(ids), strict=True)
        segments = [
            torch.cat([head.float(), own.float(), *([heard.float().flatten()] if heard is not None else [])])
            for own, head, heard in parts
        ]
        return {"text": list(ids), "segments": segments}
