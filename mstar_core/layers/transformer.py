"""Transformer layers that model plugins share: embedding, head, norm, gated MLP, attention and the decoder block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

import torch
from torch import nn
from torch.nn.functional import embedding, linear

from mstar_core.layers.kv_view import KeepingView, PackedView
from mstar_core.layers.linear import (
    LinearWeight,
    PreparedLayer,
    activate,
    concatenate_weights,
    elementwise_kernels,
    gated,
    project,
    project_gated,
    project_gated_down,
    project_partial,
    sum_partials,
    uses_fused_kernels,
    uses_small_m,
    weight_of,
)
from mstar_core.layers.lora import AdapterBank
from mstar_core.layers.rotary import rotate
from mstar_core.parallel.shards import WHOLE, Shard, Slice, head_slices

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import HeadNorms, KVView
    from mstar_core.layers.linear import Activation
    from mstar_core.layers.lora import AdaptedProjections, AdapterLimits


class TokenEmbedding(nn.Embedding):
    """Embedding of token ids: int64 [T] -> [T, width]. shard: its rows are divided among the ranks of a group."""

    def __init__(self, vocab: int, width: int, shard: Shard = WHOLE) -> None:
        super().__init__(shard.padded_rows(vocab), width)
        self.shard = shard
        self.vocab = vocab
        self._rows = shard.rows(vocab)

    def forward(self, ids: Tensor) -> Tensor:
        if self.shard.is_whole:
            return embedding(ids, self.weight)
        local = ids - self._rows.start
        is_elsewhere = (local < 0) | (local >= len(self._rows))
        vectors = embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return self.shard.reduce(vectors.masked_fill(is_elsewhere[:, None], 0))

    def slices(self) -> Mapping[str, Slice]:
        """Return the part of the vocabulary that this rank holds."""
        return {} if self.shard.is_whole else {"weight": Slice.part(0, self._rows, self.vocab)}


HEAD_ROWS: Final = 64
"""Rows of a head's weight on a GPU are a multiple of this: the library's fast kernels need aligned rows of logits."""


class Head(PreparedLayer):
    """Language-model head: hidden [n, width] -> logits [n, vocab] in the weight's dtype. The weight may be tied.

    shard: the rows of the weight are divided among the ranks of a group, and the logits are gathered.
    """

    def __init__(self, width: int, vocab: int, tied_to: TokenEmbedding | None = None, shard: Shard = WHOLE) -> None:
        super().__init__()
        # A tied weight stays the embedding's parameter. Registered twice, it would be loaded and counted twice.
        self._tied = (tied_to,) if tied_to is not None else None
        self.shard = shard
        self._vocab = vocab
        self._padded: Tensor | None = None
        if tied_to is None:
            rows = shard.padded_rows(vocab)
            self.weight = nn.Parameter(nn.Linear(width, rows, bias=False).weight.detach(), requires_grad=False)

    @property
    def _values(self) -> Tensor:
        return self._tied[0].weight if self._tied is not None else self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        weight = LinearWeight(self._values)
        hidden = hidden.to(weight.values.dtype)
        if self._padded is not None and not uses_small_m(hidden, weight):
            return project(hidden, LinearWeight(self._padded))[:, : len(weight.values)]
        logits = project(hidden, weight)
        return logits if self.shard.is_whole else self.shard.gather(logits)[:, : self._vocab]

    def first_weight(self) -> Tensor | None:
        """See PreparedLayer. A tied weight is not its parameter."""
        return self._values

    def fuse_projections(self) -> bool:
        """Pad the rows of the weight to a multiple of HEAD_ROWS; the weight itself becomes a view of them.

        Logits of a multiple of 8 columns take 0.55 of the time for 128 rows of a vocabulary of 156,940.
        """
        owner, weight = self._tied[0] if self._tied is not None else self, self._values
        missing = -len(weight) % HEAD_ROWS
        if self._padded is None and missing and self.shard.is_whole:
            self._padded = torch.cat([weight.detach(), weight.new_zeros(missing, weight.shape[1])])
            owner.weight.data = self._padded[: len(weight)]
            # With these rows the tensors of the module cover the storage, so that a sleep may drop it.
            self.register_buffer("padding", self._padded[len(weight) :], persistent=False)
        return self._padded is not None

    def slices(self) -> Mapping[str, Slice]:
        """Return the part of the vocabulary that this rank holds; empty if the weight is tied or whole."""
        is_own = self._tied is None and not self.shard.is_whole
        return {"weight": Slice.part(0, self.shard.rows(self._vocab), self._vocab)} if is_own else {}

    def restrict(self, spans: Sequence[range]) -> None:
        """Restrict the vocabulary to these ids, in their order: logits [n, ids]. Called once the weights are loaded.

        The rows are gathered on the weight's device; a tied embedding stays whole. The ids must lie within the
        vocabulary.
        """
        weight = self._values
        rows = torch.cat([torch.arange(span.start, span.stop, span.step, device=weight.device) for span in spans])
        if self.shard.is_whole:
            kept = weight.detach().index_select(0, rows)
        else:
            kept = self._divided(weight.detach(), rows)
            self._vocab = len(rows)
        self._tied = None
        self.weight = nn.Parameter(kept, requires_grad=False)

    def _divided(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Return this rank's share of the chosen rows of the whole weight, which the ranks hold in parts."""
        span, shard = self.shard.rows(self._vocab), self.shard
        is_here = (rows >= span.start) & (rows < span.stop)
        chosen = weight.index_select(0, (rows - span.start).clamp(0, len(weight) - 1))
        whole = shard.reduce(chosen.masked_fill(~is_here[:, None], 0))
        kept = whole.new_zeros(shard.padded_rows(len(rows)), whole.shape[1])
        part = shard.rows(len(rows))
        kept[: len(part)] = whole[part.start : part.stop]
        return kept


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; statistics in float32, result in the input's dtype."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and uses_fused_kernels(x):
            fused: Tensor = elementwise_kernels().rms_norm(x, self.weight, self.eps)
            return fused
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)

    def after_add(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + branch and its norm. branch: x's shape, or partial sums of it: see `linear.project_partial`."""
        if x.is_cuda and uses_fused_kernels(x):
            both: tuple[Tensor, Tensor] = elementwise_kernels().add_rms_norm(x, branch, self.weight, self.eps)
            return both
        total = x + sum_partials(branch, x)
        return total, self(total)


class FusibleLayer(PreparedLayer):
    """Layer that projects one input several times, and its result once more.

    projections: names of the first ones, in the order of the fused weight. last: name of the last one. adapted,
    adapted_last: the LoRA adapters of both, None in a deployment without adapters.
    """

    projections: ClassVar[tuple[str, ...]]
    last: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self._fused: LinearWeight | None = None
        self.adapted: AdaptedProjections | None = None
        self.adapted_last: AdaptedProjections | None = None

    def adapt(self, bank: AdapterBank) -> list[AdaptedProjections]:
        """Make room for the adapters of a bank. Returns the adapted projections."""
        cuts = {name.removesuffix(".weight"): cut for name, cut in self.slices().items()}
        made = []
        for names in (self.projections, (self.last,)):
            layers = [self.get_submodule(name) for name in names]
            sizes = [(int(layer.out_features), int(layer.in_features)) for layer in layers]  # type: ignore[arg-type]
            here = {name: cuts[name] for name in names if name in cuts}
            like: Tensor = layers[0].weight  # type: ignore[assignment]
            made.append(bank.adapted(names, [outputs for outputs, _ in sizes], sizes[0][1], here, like))
        self.adapted, self.adapted_last = made
        return made

    def slices(self) -> Mapping[str, Slice]:
        """Return the parts of its weights that this rank holds; empty if it holds all."""
        return {}

    def _projected(self, name: str, x: Tensor) -> Tensor:
        """Return the outputs of one of the first projections: [T, outputs]."""
        out: Tensor = self.get_submodule(name)(x)
        if self.adapted is not None:
            self.adapted.add(x, out, name)
        return out

    def fuse_projections(self) -> bool:
        """Fuse the projections into one weight. Returns whether they are fused.

        A second call keeps the fused weight, because captured graphs read it by address.
        """
        if self._fused is None:
            self._fused = concatenate_weights([self.get_submodule(name) for name in self.projections])
        return self._fused is not None

    @property
    def fused_weight(self) -> LinearWeight | None:
        """The fused weight; None before `fuse_projections`."""
        return self._fused

    def unfuse(self) -> bool:
        """Drop the fused weight; the projections keep their views of it. See PreparedLayer."""
        fused, self._fused = self._fused, None
        return fused is not None


class GatedMLP(FusibleLayer):
    """down(act(gate(x)) * up(x)). Parameters are named as in Llama.

    shard: the inner width is divided among the ranks of a group, and the outputs are summed.
    """

    projections = ("gate_proj", "up_proj")
    last = "down_proj"

    def __init__(
        self, width: int, inner: int, *, bias: bool = False, activation: Activation = "silu", shard: Shard = WHOLE
    ) -> None:
        super().__init__()
        self._activation: Activation = activation
        self._inner = inner
        self.shard = shard
        inner = len(shard.part(inner, "inner values of an MLP"))
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape. x: [T, width]."""
        return sum_partials(self.branch(x), x)

    def branch(self, x: Tensor) -> Tensor:
        """Return the same, or the partial sums of the last projection: see `linear.project_partial`."""
        weight = weight_of(self.down_proj)
        if self._fused is not None and weight is not None and self.shard.is_whole and self.adapted is None:
            rounded = project_gated_down(x, self._fused, weight, self._activation)
            if rounded is not None:
                return rounded
        inner = self._inner_values(x)
        if not self.shard.is_whole:
            return reduced(self.shard, self.down_proj, inner, self.adapted_last)
        out: Tensor
        out = project_partial(inner, weight) if weight is not None and inner.dim() == 2 else self.down_proj(inner)
        if self.adapted_last is not None:
            self.adapted_last.add(inner, out)
        return out

    def _inner_values(self, x: Tensor) -> Tensor:
        if self._fused is None or not uses_fused_kernels(x):
            return activate(self._projected("gate_proj", x), self._activation) * self._projected("up_proj", x)
        if self.adapted is None:
            return project_gated(x, self._fused, self._activation)
        # Adapters come before the activation. Tokens without one take the same kernels, so that their bits are equal.
        pair = project(x, self._fused)
        self.adapted.add(x, pair)
        return gated(pair, self._activation)

    def slices(self) -> Mapping[str, Slice]:
        """Return the parts of the inner values that this rank holds."""
        if self.shard.is_whole:
            return {}
        span = self.shard.part(self._inner, "inner values of an MLP")
        kinds = ("weight",) if self.gate_proj.bias is None else ("weight", "bias")
        outputs = Slice.part(0, span, self._inner)
        slices = {f"{name}.{kind}": outputs for name in self.projections for kind in kinds}
        return slices | {"down_proj.weight": Slice.part(1, span, self._inner)}


def reduced(shard: Shard, layer: nn.Module, x: Tensor, adapted: AdaptedProjections | None = None) -> Tensor:
    """Return the output of a row-parallel linear layer, summed over the ranks: [T, outputs]. x: [T, local inputs].

    adapted: adapters of the layer, whose A each rank has a part of.
    """
    weight = weight_of(layer)
    if weight is not None and x.dim() == 2:
        out, bias = project_partial(x, weight), None
    else:
        assert isinstance(layer, nn.Linear), "a layer with a bias is not quantized under tensor parallelism"
        out, bias = linear(x, layer.weight), layer.bias
    if adapted is not None:
        adapted.add(x, out)
    out = shard.reduce(sum_partials(out, x))
    return out if bias is None else out + bias


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Sizes of one attention layer. bias: of the query, key and value projections.

    norm_eps: set if queries and keys are normalized per head before rotation.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    output_bias: bool = False
    norm_eps: float | None = None
    scale: float | None = None


class Attention(FusibleLayer):
    """Self-attention of packed tokens. The engine's KVView appends to the cache and attends.

    shard: the heads are divided among the ranks of a group, and the outputs are summed. spec: with the heads of this
    rank.
    """

    projections = ("q_proj", "k_proj", "v_proj")
    last = "o_proj"

    def __init__(self, spec: AttentionSpec, layer: int, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.shard = shard
        self._heads, self._kv_heads = spec.heads, spec.kv_heads
        spec = replace(spec, heads=len(shard.part(spec.heads, "heads")), kv_heads=len(shard.kv_part(spec.kv_heads)))
        self.spec = spec
        self.layer = layer
        self.q_proj = nn.Linear(spec.width, spec.heads * spec.head_dim, bias=spec.bias)
        self.k_proj = nn.Linear(spec.width, spec.kv_heads * spec.head_dim, bias=spec.bias)
        self.v_proj = nn.Linear(spec.width, spec.kv_heads * spec.head_dim, bias=spec.bias)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.width, bias=spec.output_bias)
        if spec.norm_eps is not None:
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps)

    def forward(self, x: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return [T, width]. x: [T, width]; rotation: cosine and sine [T, 1, head_dim], None for none."""
        return sum_partials(self.branch(x, kv, rotation), x)

    def branch(self, x: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the same, or the partial sums of the output projection: see `linear.project_partial`."""
        spec, tokens = self.spec, x.shape[0]
        is_whole = rotation is not None and rotation[0].shape[-1] == spec.head_dim
        if rotation is not None and is_whole and self._fused is not None and uses_fused_kernels(x):
            packed = project_partial(x, self._fused)
            if self.adapted is not None:
                self.adapted.add(x, packed)
            norms = self._norms()
            if isinstance(kv, PackedView):
                attended = kv.attend_packed(self.layer, packed, rotation, spec.heads, spec.scale, norms)
                if attended is not None:
                    return self._output(attended.view(tokens, -1))
            query, key, value = elementwise_kernels().rotate_qkv(
                packed, spec.heads, spec.kv_heads, *rotation, x.dtype, norms
            )
            mixed = kv.attend(self.layer, query, key, value, spec.scale)
            return self._output(mixed.reshape(tokens, -1))
        query = self._projected("q_proj", x).view(tokens, spec.heads, spec.head_dim)
        key = self._projected("k_proj", x).view(tokens, spec.kv_heads, spec.head_dim)
        value = self._projected("v_proj", x).view(tokens, spec.kv_heads, spec.head_dim)
        if spec.norm_eps is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        mixed = kv.attend(self.layer, query, key, value, spec.scale)
        return self._output(mixed.reshape(tokens, -1))

    def append_only(self, x: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor]) -> None:
        """Append keys and values to the cache without attending: for a last layer whose output is not used.

        Arguments as for `forward`.
        """
        spec, tokens = self.spec, x.shape[0]
        if not isinstance(kv, KeepingView) or self.spec.norm_eps is not None or self.adapted is not None:
            self.branch(x, kv, rotation)
            return
        if self._fused is not None and rotation[0].shape[-1] == spec.head_dim and uses_fused_kernels(x):
            both = project(x, self._fused.after(spec.heads * spec.head_dim))  # without the queries, which come first
            _, key, value = elementwise_kernels().rotate_qkv(both, 0, spec.kv_heads, *rotation, x.dtype)
        else:
            key = rotate(self.k_proj(x).view(tokens, spec.kv_heads, spec.head_dim), *rotation)
            value = self.v_proj(x).view(tokens, spec.kv_heads, spec.head_dim)
        kv.keep(self.layer, key, value)

    def slices(self) -> Mapping[str, Slice]:
        """Return the parts of the heads that this rank holds."""
        return head_slices(
            self.shard, heads=self._heads, kv_heads=self._kv_heads, head_dim=self.spec.head_dim, has_bias=self.spec.bias
        )

    def _norms(self) -> HeadNorms | None:
        eps = self.spec.norm_eps
        return None if eps is None else (self.q_norm.weight, self.k_norm.weight, eps)

    def _output(self, mixed: Tensor) -> Tensor:
        if not self.shard.is_whole:
            return reduced(self.shard, self.o_proj, mixed, self.adapted_last)
        weight = weight_of(self.o_proj)
        out: Tensor = self.o_proj(mixed) if weight is None else project_partial(mixed, weight)
        if self.adapted_last is not None:
            self.adapted_last.add(mixed, out)
        return out


class FeedForward(Protocol):
    """The module that follows attention in a decoder block: `GatedMLP` or `moe.SparseMoE`."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def branch(self, x: Tensor) -> Tensor:
        """Return x's shape [T, width], or partial sums of it [S, T, width] that the next norm adds."""


class DecoderBlock(nn.Module):
    """Pre-norm decoder block: x + attention(norm(x)), then x + mlp(norm(x)). Parameters are named as in Llama.

    inner: width of a gated MLP, or the module that replaces it. shard: of the attention and of a gated MLP.
    """

    mlp: FeedForward

    def __init__(
        self, spec: AttentionSpec, inner: int | FeedForward, layer: int, eps: float, shard: Shard = WHOLE
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.width, eps)
        self.self_attn = Attention(spec, layer, shard)
        self.post_attention_layernorm = RMSNorm(spec.width, eps)
        self.mlp = GatedMLP(spec.width, inner, shard=shard) if isinstance(inner, int) else inner

    def forward(self, x: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return [T, width]. x: [T, width]."""
        branch = self.self_attn.branch(self.input_layernorm(x), kv, rotation)
        x, normed = self.post_attention_layernorm.after_add(x, branch)
        out: Tensor = x + self.mlp(normed)
        return out

    def forward_chained(
        self, x: Tensor, normed: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor] | None, next_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Run the block between norms, so that its last addition and the next block's norm share a kernel.

        normed: x after this block's first norm. Returns the sum and its norm, [T, width] each.
        """
        x, inner = self.post_attention_layernorm.after_add(x, self.self_attn.branch(normed, kv, rotation))
        return next_norm.after_add(x, self.mlp.branch(inner))


def adapt_layers(module: nn.Module, limits: AdapterLimits, prefix: str = "") -> AdapterBank:
    """Make room for LoRA adapters in all attention and gated MLP layers of a module.

    prefix: of the names that the module's layers have in an adapter. Called once the weights are loaded, fused and
    quantized, and before anything is captured.
    """
    bank = AdapterBank(limits)
    for path, layer in module.named_modules():
        if isinstance(layer, FusibleLayer):
            bank.layers[f"{prefix}{path}"] = layer.adapt(bank)
    return bank
