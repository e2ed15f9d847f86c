"""The node `vit_encoder`: SigLIP and a projection, from camera images to vectors of the language model's
width.

Run by the stateless engine; requests with the same number of cameras share a batch. Modules are nested like the
checkpoint's keys.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from mstar_core.engine.cuda_graphs.functions import CapturedFunction
from mstar_core.engine.module import CapturesFunction
from mstar_core.layers.linear import join_with_biases
from mstar_pi05.nodes.warm_up import of_cameras

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import GraphCache
    from mstar_core.engine.module import WarmupRequest
    from mstar_pi05.checkpoint.config import Sizes, Vision


CAPTURED: Final = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 48)
"""Batch sizes in cameras with a CUDA graph: up to sixteen requests of three cameras."""


class Embeddings(nn.Module):
    """Patch embeddings in row order, with learned positions."""

    def __init__(self, vision: Vision) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, vision.width, vision.patch_size, vision.patch_size)
        self.position_embedding = nn.Embedding(vision.tokens, vision.width)

    def forward(self, images: Tensor) -> Tensor:
        """Return [N, tokens, width]. images: [N, S, S, 3] in [-1, 1]."""
        conv = self.patch_embedding
        side, patch = images.shape[1], int(conv.kernel_size[0])
        grid = images.reshape(len(images), side // patch, patch, side // patch, patch, 3)
        # A GEMM instead of a convolution: patches do not overlap, and the bits do not depend on a convolution
        # algorithm.
        patches = grid.permute(0, 1, 3, 5, 2, 4).reshape(len(images), (side // patch) ** 2, -1)
        return linear(patches, conv.weight.flatten(1), conv.bias) + self.position_embedding.weight


class VisionAttention(nn.Module):
    """Attention among all patches of an image."""

    def __init__(self, vision: Vision) -> None:
        super().__init__()
        self.heads = vision.heads
        self.head_dim = vision.width // vision.heads
        self.q_proj = nn.Linear(vision.width, vision.width)
        self.k_proj = nn.Linear(vision.width, vision.width)
        self.v_proj = nn.Linear(vision.width, vision.width)
        self.out_proj = nn.Linear(vision.width, vision.width)
        self._joined: tuple[Tensor, Tensor] | None = None

    def join(self) -> None:
        """Join the three input projections into one matrix. Their weights become views of it."""
        self._joined = join_with_biases([self.q_proj, self.k_proj, self.v_proj])

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape. x: [N, tokens, width]."""
        if self._joined is not None:
            packed = linear(x, *self._joined)
            if packed.is_cuda and packed.dtype == torch.float32 and self.head_dim >= _kernels().NARROWEST:
                return cast("Tensor", self.out_proj(_kernels().attention(packed, self.heads)))
            projected = packed.chunk(3, dim=-1)
        else:
            projected = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in projected]
        mixed = scaled_dot_product_attention(*heads)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(-2))
        return out


class VisionMLP(nn.Module):
    def __init__(self, vision: Vision) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision.width, vision.mlp)
        self.fc2 = nn.Linear(vision.mlp, vision.width)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype != torch.float32:
            # The GEMM epilogue computes the tanh GELU before rounding.
            flat = x.flatten(0, -2)
            inner = torch._addmm_activation(self.fc1.bias, flat, self.fc1.weight.t(), use_gelu=True)
            return cast("Tensor", self.fc2(inner.unflatten(0, x.shape[:-1])))
        out: Tensor = self.fc2(gelu(self.fc1(x), approximate="tanh"))
        return out


class VisionBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, vision: Vision, eps: float) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(vision.width, eps)
        self.self_attn = VisionAttention(vision)
        self.layer_norm2 = nn.LayerNorm(vision.width, eps)
        self.mlp = VisionMLP(vision)

    def forward(self, x: Tensor, normed: Tensor, after: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """Run the block between norms: `normed` is x after `layer_norm1`; `after` norms the last sum.

        x: [N, tokens, width]. Returns the sum and its norm in x's shape.
        """
        x, inner = _summed(x, self.self_attn(normed), self.layer_norm2)
        return _summed(x, self.mlp(inner), after)


class Encoder(nn.Module):
    def __init__(self, vision: Vision, eps: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionBlock(vision, eps) for _ in range(vision.layers))


class VisionTower(nn.Module):
    """Image encoder (SigLIP), from images to vectors of its own width."""

    def __init__(self, vision: Vision, eps: float) -> None:
        super().__init__()
        self.embeddings = Embeddings(vision)
        self.encoder = Encoder(vision, eps)
        self.post_layernorm = nn.LayerNorm(vision.width, eps)

    def forward(self, images: Tensor) -> Tensor:
        """Return [N, tokens, width]. images: [N, S, S, 3] in [-1, 1]."""
        x = self.embeddings(images)
        blocks = cast("list[VisionBlock]", list(self.encoder.layers))
        norms = [*(block.layer_norm1 for block in blocks), self.post_layernorm]
        normed: Tensor = norms[0](x)
        for block, after in zip(blocks, norms[1:], strict=True):
            x, normed = block(x, normed, after)
        return normed


class Cameras(nn.Module, CapturesFunction):
    """The image tower and its projection. Only text embeddings are scaled, not these vectors.

    rounds: whether float32 GEMMs may use TF32 on a GPU.
    """

    host_ports = ("tokens",)
    device_outputs = ("features",)

    def __init__(self, sizes: Sizes, *, rounds: bool = False) -> None:
        super().__init__()
        self.tower = VisionTower(sizes.vision, sizes.layer_norm_eps)
        self.projector = nn.Linear(sizes.vision.width, sizes.language.width)
        self._rounds = rounds
        self._sizes = sizes
        self._replayed = CapturedFunction(self.vectors, CAPTURED)

    def capture(self, captures: GraphCache) -> None:
        """Use CUDA graphs for the tower, with joined projections."""
        for block in self.tower.encoder.layers:
            assert isinstance(block, VisionBlock)
            block.self_attn.join()
        self._replayed = CapturedFunction(self.vectors, CAPTURED, captures)

    def warmup_requests(self) -> Sequence[WarmupRequest]:
        """Return requests with the usual numbers of cameras."""
        return of_cameras(self._sizes)

    def forward(self, *, images: Tensor, tokens: Tensor | Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Encode cameras. images: uint8, or floats in [-1, 1], [B, c, S, S, 3]. tokens: int64 [n] per request, on the
        host.

        Returns {"features": B tensors [n, width]}: camera vectors in order, then zeros at the positions of
        the prompt.
        """
        vectors = self._by_request(images, self._replayed.borrow(images.flatten(0, 1)))
        lengths, (cells, width) = [len(ids) for ids in tokens], vectors.shape[1:]
        # One kernel each for zeros and concatenation of all requests: per request, launches would dominate.
        blank = vectors.new_zeros(max(lengths) - cells, width)
        parts = [
            part for camera, length in zip(vectors, lengths, strict=True) for part in (camera, blank[: length - cells])
        ]
        return {"features": list(torch.cat(parts).split(lengths))}

    def encode(self, images: Tensor) -> Tensor:
        """Return [B, c * tokens, width]. images: [B, c, S, S, 3]."""
        return self._by_request(images, self._replayed(images.flatten(0, 1)))

    def _by_request(self, images: Tensor, vectors: Tensor) -> Tensor:
        return vectors.view(len(images), -1, vectors.shape[-1])

    def vectors(self, images: Tensor) -> Tensor:
        """Return [N, tokens, width]. images: [N, S, S, 3]."""
        dtype = self.projector.weight.dtype
        pixels = images.to(dtype) / 127.5 - 1.0 if images.dtype == torch.uint8 else images.to(dtype)
        with _rounding(self._rounds):
            out: Tensor = self.projector(self.tower(pixels))
        return out


def _summed(x: Tensor, branch: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return x + branch, and its norm."""
    if x.is_cuda:
        both: tuple[Tensor, Tensor] = importlib.import_module("mstar_core.layers.kernels.elementwise").add_layer_norm(
            x, branch, norm
        )
        return both
    total = x + branch
    return total, norm(total)


def _kernels() -> ModuleType:
    """Import the Triton kernels. Triton comes with CUDA builds of torch only."""
    return importlib.import_module("mstar_pi05.kernels.vision_attention")


@contextlib.contextmanager
def _rounding(is_on: bool) -> Iterator[None]:
    """Allow or forbid TF32 in float32 GEMMs launched inside."""
    products = torch.backends.cuda.matmul
    before = products.allow_tf32
    products.allow_tf32 = is_on
    try:
        yield
    finally:
        products.allow_tf32 = before
