"""Codec encoder: a recording to frames of codes (specification section 14). Runs in float32, one clip at a time.

Parameters are named as in the checkpoint after `encoder.`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn.functional import conv1d, elu, gelu, linear, pad, scaled_dot_product_attention

from mstar_core.layers import Rotary, RotarySpec, rotate
from mstar_qwen3tts.codec.codec import LEAST_USAGE
from mstar_qwen3tts.codec.layers import LayerScale

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_qwen3tts.checkpoint.config import CodecEncoderSizes

DOWN: Final = 2
"""Frames of the transformer in one frame of codes."""


class StridedConv(nn.Module):
    """Causal convolution; the length becomes ceil(length / stride). mode: how the edges are padded."""

    def __init__(
        self, inner: int, outer: int, kernel: int, stride: int = 1, *, bias: bool = True, mode: str = "constant"
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inner, outer, kernel, stride, bias=bias)
        self.kernel, self.stride, self.mode = kernel, stride, mode

    def forward(self, x: Tensor) -> Tensor:
        """Return [1, outer, ceil(T / stride)]. x: [1, inner, T]."""
        left = self.kernel - self.stride
        right = math.ceil(x.shape[2] / self.stride) * self.stride - x.shape[2]
        x = pad(x, (left, right), mode=self.mode)
        return conv1d(x, self.conv.weight, self.conv.bias, self.stride)


class Residual(nn.Module):
    """x + conv1(elu(conv3(elu(x)))), with fewer channels inside."""

    def __init__(self, channels: int, sizes: CodecEncoderSizes) -> None:
        super().__init__()
        inner = channels // sizes.compress
        self.block = nn.ModuleList(
            [
                nn.ELU(),
                StridedConv(channels, inner, sizes.residual_kernel),
                nn.ELU(),
                StridedConv(inner, channels, 1),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape."""
        out: Tensor = x + self.block[3](elu(self.block[1](elu(x))))
        return out


class ConvEncoder(nn.Module):
    """Samples to vectors at twice the rate of frames."""

    def __init__(self, sizes: CodecEncoderSizes) -> None:
        super().__init__()
        channels = sizes.filters
        layers: list[nn.Module] = [StridedConv(1, channels, sizes.kernel)]
        for ratio in reversed(sizes.ratios):
            layers += [
                Residual(channels, sizes),
                nn.ELU(),
                StridedConv(channels, 2 * channels, 2 * ratio, ratio),
            ]
            channels *= 2
        layers += [nn.ELU(), StridedConv(channels, sizes.width, sizes.last_kernel)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return [1, width, T]. x: [1, 1, samples]."""
        for layer in self.layers:
            x = layer(x)
        return x


class CausalAttention(nn.Module):
    """Attention to a position and all before it."""

    def __init__(self, sizes: CodecEncoderSizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        inner = sizes.heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.width, inner, bias=False)
        self.k_proj = nn.Linear(sizes.width, inner, bias=False)
        self.v_proj = nn.Linear(sizes.width, inner, bias=False)
        self.o_proj = nn.Linear(inner, sizes.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return x's shape. x: [T, width]."""
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        mixed = scaled_dot_product_attention(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True
        )
        out: Tensor = self.o_proj(mixed.transpose(0, 1).flatten(1))
        return out


class EncoderMLP(nn.Module):
    """fc2(gelu(fc1(x)))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner, bias=False)
        self.fc2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape."""
        out: Tensor = self.fc2(gelu(self.fc1(x)))
        return out


class EncoderBlock(nn.Module):
    """x + scale * attention(norm(x)), then x + scale * mlp(norm(x))."""

    def __init__(self, sizes: CodecEncoderSizes) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(sizes.width, sizes.norm_eps)
        self.self_attn = CausalAttention(sizes)
        self.self_attn_layer_scale = LayerScale(sizes.width)
        self.post_attention_layernorm = nn.LayerNorm(sizes.width, sizes.norm_eps)
        self.mlp = EncoderMLP(sizes.width, sizes.mlp)
        self.mlp_layer_scale = LayerScale(sizes.width)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return x's shape. x: [T, width]."""
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), rotation))
        out: Tensor = x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
        return out


class EncoderTransformer(nn.Module):
    """Blocks without a final norm."""

    def __init__(self, sizes: CodecEncoderSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderBlock(sizes) for _ in range(sizes.layers))
        self.rotary = Rotary(RotarySpec(width=sizes.head_dim, base=sizes.rope_base))

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape. x: [T, width]."""
        rotation = self.rotary(torch.arange(len(x), device=x.device))
        for layer in self.layers:
            x = layer(x, rotation)
        return x


class EncoderCodebook(nn.Module):
    """Vectors of one level, stored as sums and how many they are sums of."""

    def __init__(self, sizes: CodecEncoderSizes) -> None:
        super().__init__()
        self.embed_sum = nn.Parameter(torch.zeros(sizes.codebook, sizes.vector))
        self.cluster_usage = nn.Parameter(torch.ones(sizes.codebook))
        self.initialized = nn.Parameter(torch.ones(1), requires_grad=False)


class ResidualQuantizer(nn.Module):
    """Levels of codebooks behind an input projection. The output projection of the file has no use here."""

    def __init__(self, sizes: CodecEncoderSizes, levels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"codebook": EncoderCodebook(sizes)}) for _ in range(levels))
        self.input_proj = nn.Conv1d(sizes.width, sizes.vector, 1, bias=False)

    def forward(self, x: Tensor, levels: int) -> Tensor:
        """Return the codes of the first levels: int64 [T, levels]. x: [T, width]."""
        rest, codes = linear(x, self.input_proj.weight[:, :, 0]), []
        for layer in list(self.layers)[:levels]:
            book = layer["codebook"]  # type: ignore[index]
            vectors = book.embed_sum / book.cluster_usage.clamp(min=LEAST_USAGE)[:, None]
            nearest = torch.cdist(rest[None], vectors[None], compute_mode="donot_use_mm_for_euclid_dist")[0].argmin(1)
            rest = rest - vectors[nearest]
            codes.append(nearest)
        return torch.stack(codes, dim=1)


class EncoderQuantizer(nn.Module):
    """The first group, and the other ones from the same vectors."""

    def __init__(self, sizes: CodecEncoderSizes) -> None:
        super().__init__()
        self.groups = sizes.groups
        self.semantic_residual_vector_quantizer = ResidualQuantizer(sizes, 1)
        self.acoustic_residual_vector_quantizer = ResidualQuantizer(sizes, sizes.levels - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return int64 [T, groups]. x: [T, width]."""
        first = self.semantic_residual_vector_quantizer(x, 1)
        return torch.cat([first, self.acoustic_residual_vector_quantizer(x, self.groups - 1)], dim=1)


class CodecEncoder(nn.Module):
    """A clip to its codes."""

    def __init__(self, sizes: CodecEncoderSizes) -> None:
        super().__init__()
        self.encoder = ConvEncoder(sizes)
        self.encoder_transformer = EncoderTransformer(sizes)
        self.downsample = StridedConv(sizes.width, sizes.width, 2 * DOWN, DOWN, bias=False, mode="replicate")
        self.quantizer = EncoderQuantizer(sizes)

    def forward(self, samples: Tensor) -> Tensor:
        """Return int64 [frames, groups]. samples: float32 [n]."""
        x = self.encoder(samples.float()[None, None])
        x = self.encoder_transformer(x[0].T).T[None]
        codes: Tensor = self.quantizer(self.downsample(x)[0].T)
        return codes
