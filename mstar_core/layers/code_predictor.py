"""Residual code predictor: groups 1 and up of one frame of codes, for speech models with several codebooks.

Called by the module that draws group 0. Source: Qwen3-Omni and Qwen3-TTS, whose parameter names it has.

Cost model on CUDA: per step the weights of all layers once; seven kernels a layer. One frame is a chain of
`groups - 1` steps with no host work between them, so a captured graph holds it whole.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn.functional import embedding, scaled_dot_product_attention

from mstar_core.layers.linear import PreparedLayer, project_partial, uses_fused_kernels, weight_of
from mstar_core.layers.rotary import Rotary, RotarySpec
from mstar_core.layers.sampling import draw
from mstar_core.layers.transformer import AttentionSpec, DecoderBlock, Head, RMSNorm, TokenEmbedding

if TYPE_CHECKING:
    from torch import Tensor

Choose = Callable[[int, "Tensor"], "Tensor"]
"""Called with a step and its logits [B, vocab]; returns the codes, int64 [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodePredictorSpec:
    """Sizes of a code predictor. vocab: codes of one group; groups: of a frame, group 0 included.

    input_width: of the caller's state and of all embeddings; if it differs from `width`, a linear layer with bias
    brings them to it. None: `width`.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    groups: int
    input_width: int | None = None
    rope_base: float = 1e6
    norm_eps: float = 1e-6

    @property
    def projects(self) -> bool:
        """Whether inputs are brought to another width."""
        return self.input_width not in (None, self.width)


class FrameCache:
    """Keys and values of one frame for a batch: a dense KVView. Owned by one call of `CodePredictor.unroll`."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Append and attend. Tokens are packed by sequence, equally many of each: see `KVView.attend`."""
        heads = [part.unflatten(0, (self._sequences, -1)).transpose(1, 2) for part in (query, key, value)]
        if layer in self._layers:
            heads[1:] = [torch.cat(pair, dim=2) for pair in zip(self._layers[layer], heads[1:], strict=True)]
        self._layers[layer] = (heads[1], heads[2])
        mixed = scaled_dot_product_attention(
            heads[0], heads[1], heads[2], is_causal=heads[0].shape[2] > 1, scale=scale, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(0, 1)


class PredictorDecoder(PreparedLayer):
    """Layers of the predictor, and one embedding per group from 1 on."""

    rotation: Tensor
    first_rows: Tensor

    def __init__(self, sizes: CodePredictorSpec) -> None:
        super().__init__()
        groups, width = sizes.groups, sizes.input_width or sizes.width
        self.codec_embedding = nn.ModuleList(TokenEmbedding(sizes.vocab, width) for _ in range(groups - 1))
        spec = AttentionSpec(
            width=sizes.width,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            norm_eps=sizes.norm_eps,
        )
        blocks = (DecoderBlock(spec, sizes.mlp, layer, sizes.norm_eps) for layer in range(sizes.layers))
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(sizes.width, sizes.norm_eps)
        rotary = Rotary(RotarySpec(width=sizes.head_dim, base=sizes.rope_base))
        # Plain arithmetic: angles must not depend on whether a kernel made them.
        angles = torch.arange(groups, dtype=torch.float32)[:, None] * rotary.frequencies[None]
        both = torch.cat([angles, angles], dim=-1)
        self.register_buffer("rotation", torch.stack([both.cos(), both.sin()]), persistent=False)
        first = torch.arange(groups - 1, dtype=torch.int64) * sizes.vocab
        self.register_buffer("first_rows", first, persistent=False)
        self._table: Tensor | None = None

    def fuse_projections(self) -> bool:
        """Put all embeddings into one table, of which their weights become views. Returns True."""
        if self._table is None:
            tables = cast("list[TokenEmbedding]", list(self.codec_embedding))
            self._table = torch.cat([table.weight.detach() for table in tables])
            for table, weight in zip(tables, self._table.split(tables[0].num_embeddings), strict=True):
                table.weight.data = weight
        return True

    def sum_embeddings(self, codes: Tensor) -> Tensor:
        """Return the sum of the embeddings of all residual codes: [B, width]. codes: int64 [B, groups - 1]."""
        tables = cast("list[TokenEmbedding]", list(self.codec_embedding))
        if self._table is None:
            return torch.stack([table(codes[:, index]) for index, table in enumerate(tables)], dim=1).sum(dim=1)
        return embedding(codes + self.first_rows, self._table).sum(dim=1)


class CodePredictor(PreparedLayer):
    """Dense decoder that unrolls the residual codes of a frame. Parameters are named as in the checkpoints."""

    def __init__(self, sizes: CodePredictorSpec) -> None:
        super().__init__()
        self.sizes, self.groups = sizes, sizes.groups
        self.model = PredictorDecoder(sizes)
        self.lm_head = nn.ModuleList(Head(sizes.width, sizes.vocab) for _ in range(sizes.groups - 1))
        if sizes.projects:
            self.small_to_mtp_projection = nn.Linear(sizes.input_width or sizes.width, sizes.width)
        self._projected: list[Tensor] | None = None

    def fuse_projections(self) -> bool:
        """Project all rows of the embeddings once, so that a step reads its input from a table. Returns True."""
        if self._projected is None and self.sizes.projects:
            tables = cast("list[TokenEmbedding]", list(self.model.codec_embedding))
            self._projected = [self.project(table.weight.detach()) for table in tables]
        return True

    def project(self, x: Tensor) -> Tensor:
        """Bring vectors of the caller to the predictor's width: [..., width]. x: [..., input_width]."""
        out: Tensor = self.small_to_mtp_projection(x) if self.sizes.projects else x
        return out

    def inputs(self, group: int) -> Tensor:
        """Return the table of input vectors of a group, counted from group 1: [vocab, width]."""
        if self._projected is not None:
            return self._projected[group]
        return self.project(cast("TokenEmbedding", self.model.codec_embedding[group]).weight)

    def predict(
        self, last_hidden: Tensor, first: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
    ) -> Tensor:
        """Draw the residual codes of one frame per sequence: int64 [B, groups - 1].

        last_hidden: [B, input_width], the caller's normalized state; first: its embedding of code 0, of that shape;
        uniform: float32 [B, groups - 1] in [0, 1); the rest [B], as `layers.sampling.draw`. A code is BAD_ROW where its
        logits have no finite maximum.
        """
        heat, mass = temperature.float(), top_p.float()
        return self.unroll(last_hidden, first, lambda step, logits: draw(logits, uniform[:, step], heat, top_k, mass))

    def unroll(self, last_hidden: Tensor, first: Tensor, choose: Choose) -> Tensor:
        """Run all steps, each with the code that `choose` took from the logits before: int64 [B, groups - 1]."""
        sequences = len(last_hidden)
        frame = _Frame(self, sequences, last_hidden)
        x = self.project(torch.stack([last_hidden, first], dim=1).flatten(0, 1))
        hidden = frame.run(x, frame.norm(x), 0).unflatten(0, (sequences, 2))[:, 1].contiguous()
        codes: list[Tensor] = []
        for step, head in enumerate(self.lm_head):
            if step:
                x, normed = frame.embed(step - 1, codes[-1])
                hidden = frame.run(x, normed, step + 1)
            codes.append(choose(step, head(hidden)))
        return torch.stack(codes, dim=1)


class _Frame:
    """One unrolling: caches, and the kernels of half precision on CUDA in place of the plain operations."""

    def __init__(self, predictor: CodePredictor, sequences: int, like: Tensor) -> None:
        sizes, model = predictor.sizes, predictor.model
        self._predictor, self._model, self._sizes = predictor, model, sizes
        self._blocks = cast("list[DecoderBlock]", list(model.layers))
        places = 1 << (predictor.groups - 1).bit_length()
        fused = all(block.self_attn.fused_weight is not None for block in self._blocks)
        self._kernels = _kernels(places, sizes.head_dim) if fused and uses_fused_kernels(like) else None
        self._sequences, self._view = sequences, FrameCache(sequences)
        if self._kernels is not None:
            shape = (sizes.layers, 2, sequences, sizes.kv_heads, places, sizes.head_dim)
            self._cache = like.new_empty(shape)

    def norm(self, x: Tensor) -> Tensor:
        """Return the first layer's norm."""
        out: Tensor = self._blocks[0].input_layernorm(x)
        return out

    def embed(self, group: int, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings of codes of a group, counted from group 1, and their first norm. A bad code is 0."""
        if self._kernels is not None:
            first, table = self._blocks[0].input_layernorm, self._predictor.inputs(group)
            both: tuple[Tensor, Tensor] = self._kernels.embed_norm(codes, table, first.weight, first.eps)
            return both
        embedded: Tensor = self._model.codec_embedding[group](codes.clamp(min=0))
        x = self._predictor.project(embedded)
        return x, self.norm(x)

    def run(self, x: Tensor, normed: Tensor, start: int) -> Tensor:
        """Run all layers and the last norm at positions from `start` on. x: [B * n, width]; same shape."""
        norms = [*(block.input_layernorm for block in self._blocks[1:]), self._model.norm]
        for layer, (block, next_norm) in enumerate(zip(self._blocks, norms, strict=True)):
            x, inner = block.post_attention_layernorm.after_add(x, self._attend(layer, block, normed, start))
            x, normed = next_norm.after_add(x, block.mlp.branch(inner))
        return normed

    def _attend(self, layer: int, block: DecoderBlock, normed: Tensor, start: int) -> Tensor:
        attention, rotation = block.self_attn, self._model.rotation
        joined, output = attention.fused_weight, weight_of(attention.o_proj)
        if self._kernels is None or joined is None or output is None:
            here = rotation[:, start : start + len(normed) // self._sequences].repeat(1, self._sequences, 1)[:, :, None]
            return attention.branch(normed, self._view, (here[0], here[1]))
        cache = self._cache[layer]
        mixed = self._kernels.frame_attention(
            project_partial(normed, joined),
            (attention.q_norm.weight, attention.k_norm.weight),
            (rotation[0], rotation[1]),
            (cache[0], cache[1]),
            start,
            self._sizes.heads,
            self._sizes.norm_eps,
            normed.dtype,
        )
        return project_partial(mixed, output)


def _kernels(places: int, width: int) -> ModuleType | None:
    kernels = importlib.import_module("mstar_core.layers.kernels.code_predictor")
    return kernels if kernels.supports(places, width) else None
