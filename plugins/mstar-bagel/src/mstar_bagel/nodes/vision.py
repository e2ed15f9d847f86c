"""The node `vit_encoder`: SigLIP at any resolution, connector and grid positions, from images to vectors of the LLM.

Images of all requests of a batch are packed along one token axis; attention stays within an image. Decoded images are
resized here, with the bits of the reference, because that takes a CPU longer than everything else in a preparation.
Modules are nested like the checkpoint's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from mstar_bagel.nodes.flow import GridTable
from mstar_bagel.nodes.pixels import SignedPixels
from mstar_bagel.request.images import resized_size
from mstar_core.engine.cuda_graphs.functions import CapturedFunction
from mstar_core.engine.module import CapturesFunction
from mstar_core.layers.linear import join_with_biases
from mstar_core.layers.pixel_resize import PixelResize

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_bagel.checkpoint.config import Sizes, Vision
    from mstar_core.engine.cuda_graphs.cache import GraphCache

MOST_CAPTURED: Final = 2600
"""Most patches of a captured image: the kernels of a larger one outlast their launches."""

CHANNELS: Final = 3
MOST_VALUES: Final = 2 * CHANNELS * 518**2
"""Values of the images of a step: two of 512 x 512 pixels, as resized, which share a pass of the LLM."""


def patches(image: Tensor, side: int) -> Tensor:
    """Return the patches of an image in row-major order, [h * w, side * side * channels], channels last in each.

    image: [channels, y, x], y and x multiples of side.
    """
    channels, height, width = image.shape
    grid = image.view(channels, height // side, side, width // side, side)
    return grid.permute(1, 3, 2, 4, 0).reshape(-1, side * side * channels)


class PatchEmbeddings(nn.Module):
    """Patch embeddings and learned positions, anchored at the top left of a square table."""

    def __init__(self, vision: Vision) -> None:
        super().__init__()
        self.patch_embedding = nn.Linear(vision.patch**2 * vision.channels, vision.width)
        self.position_embedding = nn.Embedding(vision.grid**2, vision.width)
        self._patch = vision.patch
        self._grid = vision.grid

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Return [T, width] of all images. images: [channels, y, x] in [-1, 1]."""
        weight = self.patch_embedding.weight
        packed = torch.cat([patches(image.to(weight.dtype), self._patch) for image in images])
        out: Tensor = self.patch_embedding(packed) + torch.cat([self._positions(image) for image in images])
        return out

    def _positions(self, image: Tensor) -> Tensor:
        table = self.position_embedding.weight.view(self._grid, self._grid, -1)
        return table[: image.shape[1] // self._patch, : image.shape[2] // self._patch].flatten(0, 1)


class PatchAttention(nn.Module):
    """Attention among all patches of an image."""

    def __init__(self, vision: Vision) -> None:
        super().__init__()
        self.heads = vision.heads
        self.q_proj = nn.Linear(vision.width, vision.width)
        self.k_proj = nn.Linear(vision.width, vision.width)
        self.v_proj = nn.Linear(vision.width, vision.width)
        self.out_proj = nn.Linear(vision.width, vision.width)
        self._joined: tuple[Tensor, Tensor] | None = None

    def join(self) -> None:
        """Join the three input projections into one. Their weights become views of it."""
        self._joined = join_with_biases([self.q_proj, self.k_proj, self.v_proj])

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        """Return x's shape. x: [T, width]; lengths: patches of each image."""
        if self._joined is not None:
            packed = linear(x, *self._joined)
        else:
            packed = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        parts = packed.view(1, len(x), 3, self.heads, -1).transpose(1, 3).split(lengths, dim=3)
        mixed = [
            scaled_dot_product_attention(part[:, :, 0], part[:, :, 1], part[:, :, 2])[0].transpose(0, 1).flatten(1)
            for part in parts
        ]
        out: Tensor = self.out_proj(mixed[0] if len(mixed) == 1 else torch.cat(mixed))
        return out


class PatchMLP(nn.Module):
    """Two linear layers with a tanh GELU. Also the connector, whose widths differ."""

    def __init__(self, width: int, inner: int, outer: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, outer)

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, outer]. x: [T, width]."""
        if x.is_cuda and x.dtype != torch.float32:
            # The GEMM epilogue computes the tanh GELU before rounding.
            inner = torch._addmm_activation(self.fc1.bias, x, self.fc1.weight.t(), use_gelu=True)
        else:
            inner = gelu(self.fc1(x), approximate="tanh")
        out: Tensor = self.fc2(inner)
        return out


class PatchBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, vision: Vision) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(vision.width, vision.eps)
        self.self_attn = PatchAttention(vision)
        self.layer_norm2 = nn.LayerNorm(vision.width, vision.eps)
        self.mlp = PatchMLP(vision.width, vision.mlp, vision.width)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        """Return x's shape. x: [T, width]."""
        x = x + self.self_attn(self.layer_norm1(x), lengths)
        out: Tensor = x + self.mlp(self.layer_norm2(x))
        return out


class PatchEncoder(nn.Module):
    def __init__(self, vision: Vision) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PatchBlock(vision) for _ in range(vision.layers))


class VisionModel(nn.Module):
    """SigLIP without pooling head."""

    def __init__(self, vision: Vision) -> None:
        super().__init__()
        self.embeddings = PatchEmbeddings(vision)
        self.encoder = PatchEncoder(vision)
        self.post_layernorm = nn.LayerNorm(vision.width, vision.eps)

    @property
    def blocks(self) -> list[PatchBlock]:
        return cast("list[PatchBlock]", list(self.encoder.layers))

    def forward(self, images: Sequence[Tensor], lengths: list[int]) -> Tensor:
        """Return [T, width] of all images."""
        x = self.embeddings(images)
        for block in self.blocks:
            x = block(x, lengths)
        out: Tensor = self.post_layernorm(x)
        return out


class VisionTower(nn.Module):
    def __init__(self, vision: Vision) -> None:
        super().__init__()
        self.vision_model = VisionModel(vision)


class ImageFeatures(nn.Module, CapturesFunction):
    """Images to vectors of the LLM's width.

    On CUDA an image is encoded alone, in a graph, if it is small and its size is a frequent one: the launches of a
    batch take longer than its kernels. A step takes as many images as a pass of the LLM.
    """

    device_outputs = ("features",)
    most_values = MOST_VALUES

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.language.width
        self.vit_model = VisionTower(sizes.vision)
        self.connector = PatchMLP(sizes.vision.width, width, width)
        self.vit_pos_embed = GridTable(sizes.vision.grid, width)
        self.pixels = SignedPixels()
        self._resize = PixelResize()
        self._rules = sizes.vae_rule, sizes.vit_rule
        self._patch = sizes.vision.patch
        self._replayed = CapturedFunction(self._alone, (1,))

    def capture(self, captures: GraphCache) -> None:
        """Join the projections of each block and capture the encoding of small images."""
        for block in self.vit_model.vision_model.blocks:
            block.self_attn.join()
        self._replayed = CapturedFunction(self._alone, (1,), captures, self._is_small)

    def forward(self, *, image: Tensor | Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Return {"features": one tensor [n, width] per image}.

        image: of each [channels, y, x], uint8 or in [-1, 1], or uint8 [y, x, channels], which is resized by both rules.
        """
        images = [self._resized(each) if each.shape[-1] == CHANNELS else each for each in image]
        if len(images) == 1 or all(self._is_small(tuple(each.shape)) for each in images):
            return {"features": [self._replayed(each[None])[0] for each in images]}
        return {"features": self._encoded(images)}

    def _resized(self, image: Tensor) -> Tensor:
        """Return a decoded image after the rules of the specification, section 7: uint8 [channels, y, x]."""
        image = image.permute(2, 0, 1).contiguous()
        for rule in self._rules:
            width, height = resized_size((image.shape[2], image.shape[1]), rule)
            image = self._resize(image, height, width)
        return image

    def _encoded(self, images: list[Tensor]) -> list[Tensor]:
        grids = [(image.shape[1] // self._patch, image.shape[2] // self._patch) for image in images]
        lengths = [rows * columns for rows, columns in grids]
        tables = [self.vit_pos_embed(rows, columns) for rows, columns in grids]
        packed = self.connector(self.vit_model.vision_model([self.pixels(image) for image in images], lengths))
        return list((packed + (tables[0] if len(tables) == 1 else torch.cat(tables))).split(lengths))

    def _alone(self, image: Tensor) -> Tensor:
        """Return the features of one image, [1, n, width]. image: [1, channels, y, x]."""
        return self._encoded([image[0]])[0][None]

    def _is_small(self, shape: tuple[int, ...]) -> bool:
        return shape[-2] * shape[-1] <= MOST_CAPTURED * self._patch**2
