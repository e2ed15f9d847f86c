"""Element-wise parts of a transformer block in float32: norms, modulation, gates and rotary positions.

On CUDA in half precision they are one kernel each; the torch functions are the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import layer_norm

from mstar_core.layers.linear import elementwise_kernels
from mstar_wan22.nodes.rotary import rotate

if TYPE_CHECKING:
    from torch import Tensor, nn

HALF: Final = (torch.bfloat16, torch.float16)
FUSED_SPANS: Final = 2
"""Most spans that the kernels distinguish."""


def modulated(x: Tensor, shift: Tensor, scale: Tensor, spans: Sequence[int], eps: float) -> Tensor:
    """Return LN(x) * (1 + scale) + shift. x: [B, n, width]; shift, scale: float32 [B, S, width], one per span."""
    if _is_fused(x) and len(spans) <= FUSED_SPANS:
        from mstar_wan22.nodes import fused_tokens

        return fused_tokens.modulated(x, shift, scale, spans[0], eps)

    def part(piece: Tensor, number: int) -> Tensor:
        wide = layer_norm(piece.float(), piece.shape[-1:], eps=eps)
        return torch.addcmul(shift[:, number, None], wide, 1 + scale[:, number, None]).to(x.dtype)

    return _by_span(x, spans, part)


def add_gated(x: Tensor, change: Tensor, gate: Tensor, spans: Sequence[int]) -> Tensor:
    """Return x + gate * change, [B, n, width]. gate: float32 [B, S, width], one per span."""
    if _is_fused(x) and _is_fused(change) and len(spans) <= FUSED_SPANS:
        from mstar_wan22.nodes import fused_tokens

        return fused_tokens.add_gated(x, change, gate, spans[0])

    def part(piece: Tensor, number: int) -> Tensor:
        before, moved = piece.unbind(0)
        return torch.addcmul(before.float(), moved.float(), gate[:, number, None]).to(x.dtype)

    if len(spans) == 1:
        return torch.addcmul(x.float(), change.float(), gate).to(x.dtype)
    return _by_span(torch.stack([x, change]), spans, part, dim=2)


def _by_span(x: Tensor, spans: Sequence[int], part: Callable[[Tensor, int], Tensor], dim: int = 1) -> Tensor:
    """Return the parts of all spans side by side along the tokens; spans without tokens are left out."""
    if len(spans) == 1:
        return part(x, 0)
    pieces = enumerate(x.split(list(spans), dim=dim))
    return torch.cat([part(piece, number) for number, piece in pieces if piece.shape[dim]], dim=1)


def shifted(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Return the LayerNorm of x, [B, n, width]. Parameters are float32."""
    if _is_fused(x):
        out: Tensor = elementwise_kernels().add_layer_norm(x, None, norm)[1]
        return out
    return layer_norm(x.float(), x.shape[-1:], norm.weight, norm.bias, norm.eps).to(x.dtype)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over the whole width, across heads."""
    if _is_fused(x):
        out: Tensor = elementwise_kernels().rms_norm(x.flatten(0, -2), weight, eps)
        return out.view(x.shape)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def turned(x: Tensor, weight: Tensor, cosines: Tensor, sines: Tensor, heads: int, eps: float) -> Tensor:
    """Return the RMS norm over the whole width, then heads turned by their positions: [B, n, heads, head_dim]."""
    if _is_fused(x):
        from mstar_wan22.nodes import fused_tokens

        return fused_tokens.turned(x, weight, cosines, sines, heads, eps)
    return rotate(normed(x, weight, eps).unflatten(-1, (heads, -1)), cosines, sines)


def _is_fused(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF and x.is_contiguous()
