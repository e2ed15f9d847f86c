"""The node `LLM`: a Mixture-of-Transformers, text model and denoiser of images in one. Run by the KV engine.

Each layer has two experts with projections, norms and MLPs of their own. Tokens of both meet in one attention. Modules
are nested like the checkpoint's keys.

The markers of an image come after its vectors, so that the vectors of an image are one slice. The order has no effect
on the result, because all tokens of an image share one position and see each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

import torch
from torch import nn

from mstar_bagel.graph import MARKERS, PASS_TOKENS
from mstar_bagel.nodes.flow import GridTable, TimeEmbedder
from mstar_core.engine.module import NodeModule
from mstar_core.layers import GatedMLP, Head, RMSNorm, Rotary, RotarySpec, TokenEmbedding, rotate
from mstar_core.layers.kv_view import KeepingView, PackedView
from mstar_core.layers.linear import (
    LinearWeight,
    PreparedLayer,
    QuantizableLayer,
    concatenate_with_biases,
    elementwise_kernels,
    library_gemm,
    project_partial,
    uses_fused_kernels,
    uses_small_m,
    weight_of,
)
from mstar_core.layers.transformer import reduced
from mstar_core.parallel.shards import WHOLE, Shard, Slice, head_slices

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_bagel.checkpoint.config import Language, Sizes
    from mstar_core.layers.kv_view import HeadNorms, KVView

Part = TypeVar("Part", bound=nn.Module)

MANY_TOKENS = 64
"""Most tokens of a small-M GEMM. Beyond it projections have no partial sums, and one program per token is faster."""

PACKED_DIMS = 2
"""Dimensions of features with their markers, of all images; those of a batch of images have one more."""

Normed: TypeAlias = "tuple[Tensor, Tensor]"
"""Hidden states and their norm, [T, width] each."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Places of both experts' tokens in a step of images. lengths: latent tokens of each image, before its markers."""

    lengths: tuple[int, ...]
    markers: int = MARKERS

    def join(self, gen: Tensor, und: Tensor) -> Tensor:
        """Return the tokens of all images in packed order. gen: [sum of lengths, ...]; und: [2 * images, ...]."""
        if len(self.lengths) == 1:
            return torch.cat([gen, und])
        pairs = zip(gen.split(list(self.lengths)), und.split(MARKERS), strict=True)
        return torch.cat([part for pair in pairs for part in pair])

    def split(self, x: Tensor) -> list[Tensor]:
        """Return the latent tokens of all images, then all markers. x: in packed order."""
        if len(self.lengths) == 1:
            return list(x.split([self.lengths[0], MARKERS]))
        sizes = [size for length in self.lengths for size in (length, MARKERS)]
        parts = x.split(sizes)
        return [torch.cat(parts[0::2]), torch.cat(parts[1::2])]

    def join_packed(
        self,
        gen: Tensor,
        und: Tensor,
        experts: tuple[AttentionExpert, AttentionExpert],
        rotation: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, of all images in packed order, by one kernel per image size.

        gen, und: results of `AttentionExpert.project_packed`; only those of markers may be partial sums.
        experts: of both, in this order.
        """
        from mstar_bagel.nodes.kernels import Images, Joined, join_qkv

        norms = experts[0].head_norms, experts[1].head_norms
        head_dim = len(norms[0][0])
        heads = experts[0].query.out_features // head_dim, experts[0].key.out_features // head_dim
        joined = Joined.empty(len(rotation[0]), heads, head_dim, like=gen)
        first = token = 0
        for length, same in itertools.groupby(self.lengths):
            count = len(list(same))
            images = Images(length=length, count=count, token=token, number=first, markers=self.markers)
            join_qkv((gen, und), norms, rotation, joined, images)
            first, token = first + count, token + count * length
        return joined.query, joined.key, joined.value


@dataclass(frozen=True, slots=True)
class AttentionExpert:
    """One expert's projections and norms of a layer. The modules are owned by the layer.

    joined: weight and bias of the query, key and value projections in one, if they are fused. shard: of the layer.
    """

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    query_norm: RMSNorm
    key_norm: RMSNorm
    joined: tuple[LinearWeight, Tensor] | None = None
    shard: Shard = WHOLE

    def project(self, x: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values before rotation, [T, heads, head_dim] each. Norms act per head."""
        query, key, value = (layer(x).unflatten(-1, (-1, head_dim)) for layer in (self.query, self.key, self.value))
        return self.query_norm(query), self.key_norm(key), value

    def project_packed(self, x: Tensor, *, is_whole: bool = False) -> Tensor:
        """Return queries, keys and values side by side, [T, heads * head_dim ...], or float32 partial sums of them.

        Of partial sums [S, T, ...] the first includes the bias. Only for fused projections. is_whole: no partial sums.
        """
        assert self.joined is not None
        weight, bias = self.joined
        if is_whole or not uses_small_m(x, weight):
            return library_gemm(x, weight, bias)
        partials = project_partial(x, weight)
        if partials.dim() == 2:
            return partials + bias
        partials[0] += bias
        return partials

    @property
    def head_norms(self) -> HeadNorms:
        """Weights and epsilon of the norms of queries and keys."""
        return self.query_norm.weight, self.key_norm.weight, self.query_norm.eps

    def branch(self, mixed: Tensor) -> Tensor:
        """Return the output projection, or partial sums of it: see `linear.project_partial`. mixed: [T, width]."""
        if not self.shard.is_whole:
            return reduced(self.shard, self.output, mixed)
        weight = weight_of(self.output)
        return self.output(mixed) if weight is None else project_partial(mixed, weight)


class MixedAttention(PreparedLayer, QuantizableLayer):
    """Self-attention with the projections of two experts. shard: the heads of both are divided among ranks."""

    def __init__(self, sizes: Language, layer: int, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.layer = layer
        self.shard = shard
        self._sizes = sizes
        self.heads, self.kv_heads = len(shard.part(sizes.heads, "heads")), len(shard.kv_part(sizes.kv_heads))
        self.head_dim = sizes.head_dim
        inner, shared = self.heads * sizes.head_dim, self.kv_heads * sizes.head_dim
        self.q_proj, self.q_proj_moe_gen = _twice(lambda: nn.Linear(sizes.width, inner))
        self.k_proj, self.k_proj_moe_gen = _twice(lambda: nn.Linear(sizes.width, shared))
        self.v_proj, self.v_proj_moe_gen = _twice(lambda: nn.Linear(sizes.width, shared))
        self.o_proj, self.o_proj_moe_gen = _twice(lambda: nn.Linear(inner, sizes.width, bias=False))
        self.q_norm, self.q_norm_moe_gen = _norms(sizes.head_dim, sizes.eps)
        self.k_norm, self.k_norm_moe_gen = _norms(sizes.head_dim, sizes.eps)
        self._joined: tuple[tuple[LinearWeight, Tensor], tuple[LinearWeight, Tensor]] | None = None

    def slices(self) -> dict[str, Slice]:
        """Return the parts of both experts' weights that this rank holds."""
        sizes, slices = self._sizes, dict[str, Slice]()
        for suffix in ("", "_moe_gen"):
            slices |= head_slices(
                self.shard,
                heads=sizes.heads,
                kv_heads=sizes.kv_heads,
                head_dim=sizes.head_dim,
                has_bias=True,
                suffix=suffix,
            )
        return slices

    def fuse_projections(self) -> bool:
        """Join the query, key and value projections of each expert. See PreparedLayer."""
        if self._joined is None:
            und, gen = self.und, self.gen
            self._joined = (
                concatenate_with_biases([und.query, und.key, und.value]),
                concatenate_with_biases([gen.query, gen.key, gen.value]),
            )
        return True

    def unfuse(self) -> bool:
        """Drop the joined projections. See PreparedLayer."""
        joined, self._joined = self._joined, None
        return joined is not None

    @property
    def und(self) -> AttentionExpert:
        """The expert of text, image features and markers."""
        return AttentionExpert(
            self.q_proj,
            self.k_proj,
            self.v_proj,
            self.o_proj,
            self.q_norm,
            self.k_norm,
            None if self._joined is None else self._joined[0],
            self.shard,
        )

    @property
    def gen(self) -> AttentionExpert:
        """The expert of latent tokens."""
        return AttentionExpert(
            self.q_proj_moe_gen,
            self.k_proj_moe_gen,
            self.v_proj_moe_gen,
            self.o_proj_moe_gen,
            self.q_norm_moe_gen,
            self.k_norm_moe_gen,
            None if self._joined is None else self._joined[1],
            self.shard,
        )

    def text(self, x: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the branch [T, width], or partial sums, of tokens that all use `und`. x: [T, width], normalized."""
        und = self.und
        if und.joined is None or not uses_fused_kernels(x):
            query, key, value = und.project(x, self.head_dim)
            rotated = rotate(query, *rotation), rotate(key, *rotation)
            return und.branch(kv.attend(self.layer, *rotated, value).flatten(1))
        packed, norms = und.project_packed(x), und.head_norms
        if isinstance(kv, PackedView):
            attended = kv.attend_packed(self.layer, packed, rotation, self.heads, None, norms)
            if attended is not None:
                return und.branch(attended.view(len(x), -1))
        return und.branch(kv.attend(self.layer, *self._split(packed, x, rotation)).reshape(len(x), -1))

    def append_only(self, x: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor]) -> None:
        """Append keys and values without attending, for a last layer whose output is not used. See `text`."""
        und = self.und
        if not isinstance(kv, KeepingView):
            self.text(x, kv, rotation)
        elif und.joined is None or not uses_fused_kernels(x):
            _, key, value = und.project(x, self.head_dim)
            kv.keep(self.layer, rotate(key, *rotation), value)
        else:
            _, key, value = self._split(und.project_packed(x), x, rotation)
            kv.keep(self.layer, key, value)

    def _split(self, packed: Tensor, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values. packed: of `und` for x, see `AttentionExpert.project_packed`."""
        und = self.und
        if len(x) > MANY_TOKENS:
            return Packing((len(x),), markers=0).join_packed(packed, packed, (und, und), rotation)
        kernels = elementwise_kernels()
        query, key, value = kernels.rotate_qkv(packed, self.heads, self.kv_heads, *rotation, x.dtype, und.head_norms)
        return query, key, value

    def images(
        self, gen: Tensor, und: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor], packing: Packing
    ) -> tuple[Tensor, Tensor]:
        """Return the branches of latent tokens and of markers. Arguments: both, normalized, [T, width]."""
        experts = self.gen, self.und
        if experts[0].joined is None or not uses_fused_kernels(gen):
            parts = (expert.project(x, self.head_dim) for expert, x in zip(experts, (gen, und), strict=True))
            query, key, value = (packing.join(*pair) for pair in zip(*parts, strict=True))
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        else:
            packed = experts[0].project_packed(gen, is_whole=True), experts[1].project_packed(und)
            query, key, value = packing.join_packed(*packed, experts, rotation)
        mixed = packing.split(kv.attend(self.layer, query, key, value).reshape(len(query), -1))
        return experts[0].branch(mixed[0]), experts[1].branch(mixed[1])


class MixedBlock(nn.Module):
    """Pre-norm decoder block with two experts.

    Its methods run it between norms, so that its last addition and the next block's first norm share a kernel.
    """

    def __init__(self, sizes: Language, layer: int, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.self_attn = MixedAttention(sizes, layer, shard)
        self.mlp, self.mlp_moe_gen = _twice(lambda: GatedMLP(sizes.width, sizes.mlp, shard=shard))
        self.input_layernorm, self.input_layernorm_moe_gen = _norms(sizes.width, sizes.eps)
        self.post_attention_layernorm, self.post_attention_layernorm_moe_gen = _norms(sizes.width, sizes.eps)

    def text(self, x: Normed, kv: KVView, rotation: tuple[Tensor, Tensor], after: RMSNorm) -> Normed:
        """Return the block's output and its norm by `after`. x: the same of the block before, all of `und`."""
        total, normed = self.post_attention_layernorm.after_add(x[0], self.self_attn.text(x[1], kv, rotation))
        return after.after_add(total, self.mlp.branch(normed))

    def images(
        self,
        gen: Normed,
        und: Normed,
        kv: KVView,
        rotation: tuple[Tensor, Tensor],
        packing: Packing,
        after: tuple[RMSNorm, RMSNorm],
    ) -> tuple[Normed, Normed]:
        """Return latent tokens and markers, each with its norm. after: norms of the next block, `und` first."""
        attended = self.self_attn.images(gen[1], und[1], kv, rotation, packing)
        own_gen, normed_gen = self.post_attention_layernorm_moe_gen.after_add(gen[0], attended[0])
        own_und, normed_und = self.post_attention_layernorm.after_add(und[0], attended[1])
        return (
            after[1].after_add(own_gen, self.mlp_moe_gen.branch(normed_gen)),
            after[0].after_add(own_und, self.mlp.branch(normed_und)),
        )


class MixedDecoder(nn.Module):
    """All blocks between embeddings and normalized states."""

    def __init__(self, sizes: Language, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.embed_tokens = TokenEmbedding(sizes.vocab, sizes.width, shard)
        self.layers = nn.ModuleList(MixedBlock(sizes, layer, shard) for layer in range(sizes.layers))
        self.norm, self.norm_moe_gen = _norms(sizes.width, sizes.eps)
        self.rotary = Rotary(RotarySpec(width=sizes.head_dim, base=sizes.rope_theta))

    @property
    def blocks(self) -> list[MixedBlock]:
        return cast("list[MixedBlock]", list(self.layers))

    @property
    def norms(self) -> list[tuple[RMSNorm, RMSNorm]]:
        """The norms before each block and after the last one, `und` first."""
        pairs = [(block.input_layernorm, block.input_layernorm_moe_gen) for block in self.blocks]
        return [*pairs, (self.norm, self.norm_moe_gen)]

    def text(self, x: Tensor, positions: Tensor, kv: KVView) -> Tensor:
        """Return normalized states [T, width]. x: embeddings of tokens of `und`."""
        rotation, norms = self.rotary(positions), self.norms
        both: Normed = (x, norms[0][0](x))
        for block, after in zip(self.blocks, norms[1:], strict=True):
            both = block.text(both, kv, rotation, after[0])
        return both[1]

    def append_text(self, x: Tensor, positions: Tensor, kv: KVView) -> None:
        """Append keys and values of all layers, for a pass whose states are not used. Arguments: see `text`."""
        rotation, norms, (*blocks, last) = self.rotary(positions), self.norms, self.blocks
        both: Normed = (x, norms[0][0](x))
        for block, after in zip(blocks, norms[1:], strict=False):
            both = block.text(both, kv, rotation, after[0])
        last.self_attn.append_only(both[1], kv, rotation)

    def images(self, gen: Tensor, und: Tensor, positions: Tensor, kv: KVView, packing: Packing) -> Tensor:
        """Return normalized states of the latent tokens, [sum of lengths, width]."""
        rotation, norms = self.rotary(positions), self.norms
        latents: Normed = (gen, norms[0][1](gen))
        markers: Normed = (und, norms[0][0](und))
        for block, after in zip(self.blocks, norms[1:], strict=True):
            latents, markers = block.images(latents, markers, kv, rotation, packing, after)
        return latents[1]


class LanguageModel(nn.Module):
    """Decoder and head."""

    def __init__(self, sizes: Language, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.model = MixedDecoder(sizes, shard)
        self.lm_head = Head(sizes.width, sizes.vocab, shard=shard)


class BagelLLM(nn.Module, NodeModule):
    """Text to logits, image vectors to cache, noisy latents to a velocity: one forward, chosen by the ports."""

    rounds_inputs = True
    packed_ports = ("embeds",)

    marker_ids: Tensor

    def __init__(self, sizes: Sizes, shard: Shard = WHOLE) -> None:
        super().__init__()
        width, ids = sizes.language.width, sizes.ids
        self._sizes = sizes.language
        self.language_model = LanguageModel(sizes.language, shard)
        self.vae2llm = nn.Linear(sizes.latent_width, width)
        self.llm2vae = nn.Linear(width, sizes.latent_width)
        self.time_embedder = TimeEmbedder(width)
        self.latent_pos_embed = GridTable(sizes.latent_grid, width)
        self.register_buffer("marker_ids", torch.tensor([ids.image_start, ids.image_end]), persistent=False)

    def forward(
        self,
        *,
        kv: KVView,
        positions: Tensor,
        tokens: Tensor | None = None,
        embeds: Tensor | Sequence[Tensor] | None = None,
        latent_embeds: Tensor | Sequence[Tensor] | None = None,
        latents: Tensor | Sequence[Tensor] | None = None,
        times: Tensor | None = None,
        **_: Tensor,
    ) -> dict[str, Tensor] | dict[str, list[Tensor]]:
        """Run one kind of input.

        positions: int64 [T]. tokens: int64 [T] → {"hidden": [T, width]}. embeds: features of each image [n, width], or
        those of all images with their markers, packed [T, width] → nothing. latent_embeds: clean latents of each image
        [n, width] → nothing. latents: float32 [h, w, channels] of each image, with times float32 [images, 1, 2] (flow
        time first) → {"velocity": as latents}.
        """
        decoder = self.language_model.model
        if tokens is not None:
            return {"hidden": decoder.text(decoder.embed_tokens(tokens), positions, kv)}
        if embeds is not None:
            decoder.append_text(self._packed(embeds), positions, kv)  # no id is drawn behind an image
            return {}
        if latent_embeds is not None:
            packing, markers = Packing(tuple(len(image) for image in latent_embeds)), self._markers(len(latent_embeds))
            # The encoder is float32 in every deployment.
            decoder.images(_flat(latent_embeds).to(markers.dtype), markers, positions, kv, packing)
            return {}
        assert latents is not None and times is not None
        return self._velocity(latents, times, positions, kv)

    def item_parts(self, port: str, value: Tensor) -> Sequence[Tensor]:
        """See NodeModule: the features of an image [n, width], then its markers."""
        return value, self._markers(1)

    def working_bytes(self, tokens: int) -> int:
        """See NodeModule: gate, up and inner values of the MLP, and a dozen tensors of hidden states."""
        values = 3 * self._sizes.mlp + 12 * self._sizes.width
        return max(tokens, PASS_TOKENS) * values * self.vae2llm.weight.element_size()

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab]. hidden: [n, width]."""
        logits: Tensor = self.language_model.lm_head(hidden)
        return logits

    def embed_latents(self, latents: Sequence[Tensor], times: Tensor) -> Tensor:
        """Return the embeddings of latent tokens, [T, width]. latents: [h, w, channels] each; times: [images]."""
        dtype = self.vae2llm.weight.dtype
        moments = self.time_embedder(times)
        parts = [
            self.vae2llm(image.flatten(0, 1).to(dtype)) + moment + self.latent_pos_embed(image.shape[0], image.shape[1])
            for image, moment in zip(latents, moments, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _packed(self, embeds: Tensor | Sequence[Tensor]) -> Tensor:
        """Return features and markers of all images, [T, width]. embeds: packed already, or by image."""
        if isinstance(embeds, torch.Tensor) and embeds.dim() == PACKED_DIMS:
            return embeds
        return torch.cat([part for image in embeds for part in self.item_parts("embeds", image)])

    def _velocity(
        self, latents: Tensor | Sequence[Tensor], times: Tensor, positions: Tensor, kv: KVView
    ) -> dict[str, Tensor] | dict[str, list[Tensor]]:
        images = list(latents)
        packing = Packing(tuple(image.shape[0] * image.shape[1] for image in images))
        gen = self.embed_latents(images, times[:, 0, 0])
        states = self.language_model.model.images(gen, self._markers(len(images)), positions, kv, packing)
        velocity = self.llm2vae(states).float()
        if isinstance(latents, torch.Tensor):
            return {"velocity": velocity.view(latents.shape)}
        parts = velocity.split(list(packing.lengths))
        return {"velocity": [part.view(image.shape) for part, image in zip(parts, images, strict=True)]}

    def _markers(self, images: int) -> Tensor:
        """Return the embeddings of the markers of so many images, [2 * images, width]."""
        embeds: Tensor = self.language_model.model.embed_tokens(self.marker_ids)
        return embeds.repeat(images, 1)


def _flat(parts: Tensor | Sequence[Tensor]) -> Tensor:
    """Return vectors of all images, [T, width]."""
    return parts.flatten(0, 1) if isinstance(parts, torch.Tensor) else torch.cat(list(parts))


def _twice(make: Callable[[], Part]) -> tuple[Part, Part]:
    """Return a module for each expert: `und`, `gen`."""
    return make(), make()


def _norms(width: int, eps: float) -> tuple[RMSNorm, RMSNorm]:
    return RMSNorm(width, eps), RMSNorm(width, eps)
