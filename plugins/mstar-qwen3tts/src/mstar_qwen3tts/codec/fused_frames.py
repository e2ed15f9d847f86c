"""The codec's layers on frames for CUDA: from vectors of codes to those that the decoder reads, with their states.

Linear layers that follow each other are one product, and factors of their outputs are in their weights. Created by the
node. States have the order and the layout of the layers in torch, so that both go on from each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch.nn.functional import gelu, linear

from mstar_core.layers.linear import elementwise_kernels
from mstar_qwen3tts.codec.kernels import attend, carry, mixed
from mstar_qwen3tts.codec.layers import ConvNeXt, FrameBlock, TransposedConv

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_qwen3tts.codec.layers import CausalConv, PreTransformer, States

Affine = tuple["Tensor", "Tensor"]
"""Weight [outputs, inputs] and bias."""


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """Weights of a block: queries, keys and values in one, gate and up in one, layer scales in the last ones."""

    attended_gain: Tensor
    projections: Tensor
    output: Tensor
    gain: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, block: FrameBlock) -> Self:
        """Copy the weights."""
        attention, mlp = block.self_attn, block.mlp
        return cls(
            block.input_layernorm.weight.detach(),
            torch.cat([part.weight.detach() for part in (attention.q_proj, attention.k_proj, attention.v_proj)]),
            (block.self_attn_layer_scale.scale[:, None] * attention.o_proj.weight).detach(),
            block.post_attention_layernorm.weight.detach(),
            torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
            (block.mlp_layer_scale.scale[:, None] * mlp.down_proj.weight).detach(),
        )


class FusedMix:
    """A ConvNeXt block."""

    def __init__(self, block: ConvNeXt) -> None:
        conv, gamma = block.dwconv.conv, block.gamma.detach()
        assert conv.bias is not None
        self._taps, self._bias, self._norm = conv.weight.detach()[:, 0].t().contiguous(), conv.bias, block.norm
        self._wide, self.width = block.pwconv1, len(gamma)
        self._narrow = gamma[:, None] * block.pwconv2.weight.detach(), gamma * block.pwconv2.bias.detach()

    def run(self, x: Tensor, states: States) -> Tensor:
        """Return x's shape. x: [B, steps, width]."""
        normed = mixed(joined(x, len(self._taps) - 1, states), self._taps, self._bias, self._norm)
        return x + linear(gelu(self._wide(normed)), *self._narrow)


class FusedFrames:
    """Layers on frames, in float32 on their device. Copies the weights when created."""

    def __init__(self, conv: CausalConv, transformer: PreTransformer, upsample: nn.ModuleList) -> None:
        assert conv.conv.bias is not None
        blocks = [block for block in transformer.layers if isinstance(block, FrameBlock)]
        self._blocks = [FusedBlock.of(block) for block in blocks]
        self._heads, self._past, self._reach = blocks[0].self_attn.heads, transformer.past, conv.reach
        self._last_gain, self._eps = transformer.norm.weight.detach(), transformer.norm.eps
        entry = conv.conv.weight.detach().flatten(1), conv.conv.bias.detach()
        self._entry = _composed(entry, _affine(transformer.input_proj))
        distance = torch.arange(self._past + 1, device=entry[0].device)[:, None]
        angles = distance * transformer.rotary.frequencies
        self._table = angles.cos(), angles.sin()
        ups = [_upsampling(part) for part in upsample.modules() if isinstance(part, TransposedConv)]
        ups[0] = _composed(_affine(transformer.output_proj), ups[0])
        mixes = [FusedMix(part) for part in upsample.modules() if isinstance(part, ConvNeXt)]
        self._stages = list(zip(ups, mixes, strict=True))

    def run(self, x: Tensor, states: States) -> Tensor:
        """Return [B, steps, latent]. x: [B, frames, inner]."""
        batch = len(x)
        x = linear(joined(x, self._reach, states).unfold(1, self._reach + 1, 1).flatten(2), *self._entry)
        x = self._attended(x, states)
        for up, mix in self._stages:
            wide = linear(x, *up)
            x = mix.run(wide.view(batch, -1, mix.width), states)
        return x

    def _attended(self, x: Tensor, states: States) -> Tensor:
        """Run the blocks and the last norm. x: [B, frames, width]."""
        kernels, shape = elementwise_kernels(), x.shape
        seen, left = states.exchange(1)
        torch.clamp(seen + shape[1], max=self._past, out=left)
        x, gains = x.flatten(0, 1), [*(block.attended_gain for block in self._blocks[1:]), self._last_gain]
        normed = kernels.rms_norm(x, self._blocks[0].attended_gain, self._eps)
        for block, gain in zip(self._blocks, gains, strict=True):
            packed = linear(normed, block.projections)
            state = states.exchange(2 * self._past * packed.shape[1] // 3)
            branch = linear(attend(packed, seen, state, self._table, self._heads), block.output)
            x, normed = kernels.add_rms_norm(x, branch, block.gain, self._eps)
            branch = linear(kernels.gated_activation(linear(normed, block.gate_up)), block.down)
            x, normed = kernels.add_rms_norm(x, branch, gain, self._eps)
        made: Tensor = normed.view(shape)
        return made


def joined(x: Tensor, reach: int, states: States) -> Tensor:
    """Return x behind its last `reach` steps, which it replaces in the state. x: [B, steps, channels]."""
    made = x.new_empty(len(x), reach + x.shape[1], x.shape[2])
    made[:, reach:] = x
    carry(made, reach, states.exchange(x.shape[2] * reach))
    return made


def _affine(layer: nn.Linear) -> Affine:
    return layer.weight.detach(), layer.bias.detach()


def _upsampling(layer: TransposedConv) -> Affine:
    """Return a transposed convolution without overlap as a linear layer, whose outputs are `rate` steps."""
    conv = layer.conv
    assert conv.bias is not None
    weight = conv.weight.detach().permute(2, 1, 0).flatten(0, 1).contiguous()
    return weight, conv.bias.detach().repeat(layer.rate)


def _composed(first: Affine, second: Affine) -> Affine:
    """Return two linear layers as one, rounded once."""
    (weight, bias), (over, shift) = ([part.double() for part in pair] for pair in (first, second))
    return (over @ weight).float(), (over @ bias + shift).float()
