"""Transformer of Wan 2.2: latents of a whole video, a timestep and texts in, velocities out.

Names of parameters are those of the published files. The residual stream is in the weights' dtype; timesteps,
modulation and norms are float32. Source: the model's specification, section 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn.functional import gelu, linear, pad, silu

from mstar_core.engine.module import NodeModule
from mstar_core.layers import QuantizableLayer
from mstar_core.parallel.shards import WHOLE
from mstar_wan22.nodes.attention import Heads, attend
from mstar_wan22.nodes.rotary import angles
from mstar_wan22.nodes.token_kernels import add_gated, modulated, normed, shifted, turned
from mstar_wan22.request.schedule import Column

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from mstar_core.parallel.shards import Shard
    from mstar_wan22.checkpoint.config import TransformerSizes

TEXT_ROWS: Final = 512
"""Rows of a text. Those behind the prompt are zero and are attended to."""

LONGEST_PERIOD: Final = 10000.0
FLOATS: Final = ("time_embedder", "time_proj", "scale_shift_table", "norm2")
"""Parts of names of parameters that stay float32."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Place of this rank's tokens among all. spans: tokens of each timestep, in order; cosines, sines: of positions."""

    spans: tuple[int, ...]
    cosines: Tensor
    sines: Tensor
    heads: Heads


def sinusoid(times: Tensor, width: int) -> Tensor:
    """Return cosines, then sines: float32 [n, width]. times: [n]."""
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=times.device) * (-math.log(LONGEST_PERIOD) / half)
    turned_by = times.float()[:, None] * exponents.exp()[None]
    return torch.cat([turned_by.cos(), turned_by.sin()], dim=-1)


class _Pair(nn.Module):
    """Two linear layers with a nonlinearity between them."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inputs, width)
        self.linear_2 = nn.Linear(width, width)


class _Conditions(nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self._frequencies = sizes.frequencies
        self.time_embedder = _Pair(sizes.frequencies, sizes.width)
        self.time_proj = nn.Linear(sizes.width, 6 * sizes.width)
        self.text_embedder = _Pair(sizes.text, sizes.width)

    def times(self, times: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embedding [n, width] and the modulation [n, 6, width] of timesteps [n], in float32."""
        pair = self.time_embedder
        embedded = pair.linear_2(silu(pair.linear_1(sinusoid(times, self._frequencies))))
        return embedded, self.time_proj(silu(embedded)).unflatten(-1, (6, -1))

    def texts(self, texts: Sequence[Tensor]) -> Tensor:
        """Return [B, TEXT_ROWS, width]. texts: B tensors [n, text width]; missing rows are zero."""
        pair = self.text_embedder
        rows = torch.stack([pad(text, (0, 0, 0, TEXT_ROWS - len(text))) for text in texts])
        out: Tensor = pair.linear_2(gelu(pair.linear_1(rows.to(pair.linear_1.weight.dtype)), approximate="tanh"))
        return out


class _Scale(nn.Module):
    """Weight of a norm over the whole width, across heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class _Attention(QuantizableLayer):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        width = sizes.width
        self._heads, self._eps = sizes.heads, sizes.eps
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(width, width)])
        self.norm_q, self.norm_k = _Scale(width), _Scale(width)

    def of_tokens(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Attend to all tokens of the video, also those of other ranks."""
        q, k = (
            turned(layer(x), norm.weight, tokens.cosines, tokens.sines, self._heads, self._eps)
            for layer, norm in ((self.to_q, self.norm_q), (self.to_k, self.norm_k))
        )
        v = self.to_v(x).unflatten(-1, (self._heads, -1))
        q, k, v = (tokens.heads.gathered(each) for each in (q, k, v))
        out: Tensor = self.to_out[0](tokens.heads.scattered(attend(q, k, v)).flatten(2))
        return out

    def of_text(self, x: Tensor, text: Tensor) -> Tensor:
        """Attend to all rows of the text, without positions and without a mask."""
        q = normed(self.to_q(x), self.norm_q.weight, self._eps)
        k = normed(self.to_k(text), self.norm_k.weight, self._eps)
        q, k, v = (each.unflatten(-1, (self._heads, -1)) for each in (q, k, self.to_v(text)))
        out: Tensor = self.to_out[0](attend(q, k, v).flatten(2))
        return out


class _Up(nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.proj = nn.Linear(sizes.width, sizes.inner)


class _Mlp(QuantizableLayer):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.net = nn.ModuleList([_Up(sizes), nn.Identity(), nn.Linear(sizes.inner, sizes.width)])

    def forward(self, x: Tensor) -> Tensor:
        up, _, down = self.net
        assert isinstance(up, _Up)
        out: Tensor = down(gelu(up.proj(x), approximate="tanh"))
        return out


class _Block(nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self._eps = sizes.eps
        self.scale_shift_table = nn.Parameter(torch.empty(1, 6, sizes.width))
        self.attn1, self.attn2 = _Attention(sizes), _Attention(sizes)
        self.norm2 = nn.LayerNorm(sizes.width, eps=sizes.eps)
        self.ffn = _Mlp(sizes)

    def forward(
        self, x: Tensor, modulation: Tensor, text: Tensor, tokens: Tokens, seen: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Return the values behind the block. modulation: float32 [B, timesteps, 6, width]. seen: filled with parts."""
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (self.scale_shift_table + modulation).unbind(2)
        moved = self.attn1.of_tokens(modulated(x, shift_1, scale_1, tokens.spans, self._eps), tokens)
        x = add_gated(x, moved, gate_1, tokens.spans)
        crossed = self.attn2.of_text(shifted(x, self.norm2), text)
        x = x + crossed
        changed = self.ffn(modulated(x, shift_2, scale_2, tokens.spans, self._eps))
        if seen is not None:
            seen |= {"self_attn_out": moved, "cross_attn_out": crossed, "ffn_out": changed}
        return add_gated(x, changed, gate_2, tokens.spans)


class Transformer(nn.Module):
    """The network. shard: place of this rank among those that share a video; weights are whole on each."""

    def __init__(self, sizes: TransformerSizes, shard: Shard) -> None:
        super().__init__()
        self._sizes, self.shard = sizes, shard
        side = sizes.patch
        self.patch_tokens = side**2  # latent values of a channel in one token
        self.patch_embedding = nn.Conv3d(sizes.inputs, sizes.width, (1, side, side), (1, side, side))
        self.condition_embedder = _Conditions(sizes)
        self.blocks = nn.ModuleList([_Block(sizes) for _ in range(sizes.layers)])
        self.scale_shift_table = nn.Parameter(torch.empty(1, 2, sizes.width))
        self.proj_out = nn.Linear(sizes.width, sizes.outputs * side**2)

    def forward(
        self,
        latents: Tensor,
        times: Tensor,
        spans: Sequence[int],
        texts: Sequence[Tensor],
        seen: dict[str, Tensor] | None = None,
        *,
        divides: bool = True,
    ) -> Tensor:
        """Return velocities, float32 [B, channels, frames, rows, columns].

        latents: [B, input channels, frames, rows, columns]. times: float32 [B, S], timesteps of S groups of
        consecutive tokens; spans: tokens of each group. texts: B tensors [n, text width]. seen: filled with
        intermediate values, for tests. divides: share the tokens with the other ranks of the group, if there are any.
        """
        sizes, side, batch = self._sizes, self._sizes.patch, len(latents)
        grid = (latents.shape[2], latents.shape[3] // side, latents.shape[4] // side)
        embedded, modulation = (
            each.unflatten(0, times.shape) for each in self.condition_embedder.times(times.flatten())
        )
        text = self.condition_embedder.texts(texts)
        whole = self._patches(latents)
        heads = Heads(self.shard if divides else WHOLE, whole.shape[1], sizes.heads)
        turns = heads.own(angles(grid, sizes.head_dim, whole.device)[None])[0]
        tokens = Tokens(heads.own_spans(spans), turns.cos().float(), turns.sin().float(), heads)
        x = heads.own(whole)
        if seen is not None:
            seen |= {"patch_tokens": whole, "temb": embedded, "timestep_proj": modulation.flatten(2), "text_proj": text}
        for number, block in enumerate(self.blocks):
            x = block(x, modulation, text, tokens, seen if number == 0 else None)
            if seen is not None:
                seen[f"block_{number}"] = x
        shift, scale = (self.scale_shift_table + embedded[:, :, None]).unbind(2)
        out = heads.all_tokens(self.proj_out(modulated(x, shift, scale, tokens.spans, sizes.eps)))
        pixels = out.float().view(batch, *grid, side, side, sizes.outputs).permute(0, 6, 1, 2, 4, 3, 5)
        return pixels.flatten(5, 6).flatten(3, 4)

    def _patches(self, latents: Tensor) -> Tensor:
        """Return a token per patch, [B, tokens, width]. A product, because the stride equals the kernel."""
        side, weight = self._sizes.patch, self.patch_embedding.weight
        batch, channels, frames, rows, columns = latents.shape
        cells = latents.view(batch, channels, frames, rows // side, side, columns // side, side)
        vectors = cells.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)
        return linear(vectors.to(weight.dtype), weight.flatten(1), self.patch_embedding.bias)


def keep_floats(module: Transformer) -> Transformer:
    """Hold the parameters that need float32 in it, before they are loaded. Returns the module."""
    for name, value in module.named_parameters():
        if any(part in name for part in FLOATS):
            value.data = value.data.float()
    return module


class Denoiser(nn.Module, NodeModule):
    """The nodes `transformer` and `transformer_2`: the guided velocity of one step.

    Both branches of guidance are rows of one forward pass; two ranks compute one each, which needs one exchange per
    step. Other groups divide the tokens. Videos are computed one by one: a single one fills the device, and so results
    do not depend on the batch.
    """

    host_ports = ("steps", "step")
    listed_ports = ("latents", "text", "negative", "condition")
    device_outputs = ("velocity",)

    def __init__(self, network: Transformer, *, expands: bool) -> None:
        super().__init__()
        self.network = network
        self._expands = expands

    def forward(
        self,
        *,
        latents: Sequence[Tensor],
        text: Sequence[Tensor],
        steps: Sequence[np.ndarray],
        step: np.ndarray,
        negative: Sequence[Tensor] | None = None,
        condition: Sequence[Tensor] | None = None,
    ) -> dict[str, Any]:
        """Return {"velocity": B tensors}, float32, of the latents' shape [channels, frames, rows, columns].

        steps: float32 [steps, columns of `request.schedule.Column`]; step: int64 [B], the row of each. negative: the
        text of the other branch; without it nothing is guided. condition: image latents, see `conditioned`.
        """
        outputs = []
        for item, x in enumerate(latents):
            row = steps[item][int(step[item])]
            texts = [text[item]] if negative is None else [text[item], negative[item]]
            outputs.append(self.guided(x, row, texts, None if condition is None else condition[item]))
        return {"velocity": outputs}

    def guided(self, x: Tensor, row: np.ndarray, texts: Sequence[Tensor], condition: Tensor | None) -> Tensor:
        """Return the velocity of one video. row: of its step. texts: the prompt, and the negative one if guided."""
        branches = self.branches(x, row, texts, condition)
        if len(texts) == 1:
            return branches[0]
        return branches[1] + float(row[Column.SCALE]) * (branches[0] - branches[1])

    def branches(self, x: Tensor, row: np.ndarray, texts: Sequence[Tensor], condition: Tensor | None) -> Tensor:
        """Return the velocity of each text: float32 [texts, channels, frames, rows, columns]."""
        inputs, times, spans = self.conditioned(x, float(row[Column.TIME]), condition)
        count, shard = len(texts), self.network.shard
        if shard.size == count > 1:
            own = self.network(inputs[None], times[None], spans, [texts[shard.index]], divides=False)
            return shard.exchange(own.repeat(count, 1, 1, 1, 1))
        out: Tensor = self.network(inputs.expand(count, *inputs.shape), times.expand(count, -1), spans, texts)
        return out

    def conditioned(self, x: Tensor, time: float, condition: Tensor | None) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Return the network's latents, timesteps [S] and tokens of each timestep.

        condition: with `expands` the clean first latent frame, which replaces that of x and has timestep 0; otherwise
        further channels, [channels, frames, rows, columns].
        """
        frame = x[0, 0].numel() // self.network.patch_tokens
        tokens = x.shape[1] * frame
        if condition is None:
            return x, torch.tensor([time], device=x.device), (tokens,)
        if not self._expands:
            return torch.cat([x, condition.to(x.dtype)]), torch.tensor([time], device=x.device), (tokens,)
        inputs = torch.cat([condition.to(x.dtype), x[:, 1:]], dim=1)
        if x.shape[1] == 1:
            return inputs, torch.tensor([0.0], device=x.device), (tokens,)
        return inputs, torch.tensor([0.0, time], device=x.device), (frame, tokens - frame)
