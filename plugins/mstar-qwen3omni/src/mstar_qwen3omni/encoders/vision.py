"""Node `vision_encoder`: images, and patches of videos, to vectors and deep feature maps. Run by the stateless engine.

Frames of several requests share a batch; attention stays within a frame (a frame pair of a video). Parameters are named
as in the checkpoint after `thinker.visual.`. Source: specification section 6.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import torch
from torch import nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from mstar_core.engine.cuda_graphs.functions import CapturedFunction
from mstar_core.engine.module import CapturesFunction, WarmupRequest, WarmupStep
from mstar_core.engine.transfers import upload
from mstar_core.errors import EngineError
from mstar_core.layers import rotate
from mstar_core.layers.linear import elementwise_kernels, uses_fused_kernels
from mstar_core.layers.pixel_resize import PixelResize
from mstar_qwen3omni.checkpoint.config import PATCH_FRAMES
from mstar_qwen3omni.encoders.blocks import add_norm
from mstar_qwen3omni.encoders.patches import patches_of_image, places_of, resampled, rotation_of

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import GraphCache
    from mstar_qwen3omni.checkpoint.config import OmniConfig, TextIds, VisionSizes

CAPTURED: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Batch sizes in frames with a CUDA graph."""

MOST_CAPTURED: Final = 4096
"""Patches of the largest captured batch. Kernels of larger ones are long, so the host runs ahead without a graph."""

MOST_PATCHES: Final = 16_384
"""Patches of one pass. It bounds memory, and the length of kernels that steps of other nodes on the device wait for."""

IMAGE_AXES: Final = 3
"""Axes of a decoded image, channels last. Patches have two."""

WARM_GRIDS: Final = ((16, 16), (32, 32), (48, 48), (64, 64))
"""Grids of the warm-up's images: 256, 512, 768 and 1024 pixels a side, resized from a little less."""

Rotation = tuple["Tensor", "Tensor"]
Grid = tuple[int, int, int]
"""Frames (pairs of them), rows and columns of patches."""


class PatchEmbed(nn.Module):
    """A linear map of each patch, stored as a convolution whose stride is its kernel."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        kernel = (PATCH_FRAMES, sizes.patch, sizes.patch)
        self.proj = nn.Conv3d(3, sizes.width, kernel, kernel)

    def forward(self, patches: Tensor) -> Tensor:
        """Return [..., width]. patches: [..., values], channel, frame, row, column."""
        return linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class VisionAttention(nn.Module):
    """Attention among the patches of a frame."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.proj = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return x's shape. x: [S, patches, width]; rotation: float32 [S * patches, 1, head_dim]."""
        packed = self.qkv(x).flatten(0, 1)
        if packed.is_cuda and uses_fused_kernels(packed):
            turned = elementwise_kernels().rotate_qkv(packed, self.heads, self.heads, *rotation, packed.dtype)
            if rotation[0].shape[-1] >= _kernels().NARROWEST:
                return cast("Tensor", self.proj(_kernels().attention(*turned, len(x)).view_as(x)))
        else:
            query, key, value = packed.unflatten(-1, (3, self.heads, -1)).unbind(1)
            wide = (rotate(part.float(), *rotation).to(part.dtype) for part in (query, key))
            turned = (*wide, value)
        heads = (part.unflatten(0, (len(x), -1)).transpose(1, 2) for part in turned)
        mixed = scaled_dot_product_attention(*heads)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


def _kernels() -> ModuleType:
    """Import the Triton kernels. Triton comes with CUDA builds of torch only."""
    return importlib.import_module("mstar_qwen3omni.encoders.kernels")


class VisionMLP(nn.Module):
    """fc2(gelu_tanh(fc1(x)))."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(sizes.width, sizes.mlp)
        self.linear_fc2 = nn.Linear(sizes.mlp, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape. x: [S, patches, width]."""
        first = self.linear_fc1
        if x.is_cuda and x.dtype != torch.float32:
            # The GEMM's epilogue computes the tanh GELU before rounding.
            inner = torch._addmm_activation(first.bias, x.flatten(0, -2), first.weight.t(), use_gelu=True)
            return cast("Tensor", self.linear_fc2(inner.unflatten(0, x.shape[:-1])))
        out: Tensor = self.linear_fc2(gelu(first(x), approximate="tanh"))
        return out


class VisionBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.width, 1e-6)
        self.norm2 = nn.LayerNorm(sizes.width, 1e-6)
        self.attn = VisionAttention(sizes)
        self.mlp = VisionMLP(sizes)

    def forward(self, x: Tensor, normed: Tensor, rotation: Rotation, after: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """Run the block between norms: `normed` is x after `norm1`; `after` norms the last sum.

        x: [S, patches, width]. Returns the sum and its norm in x's shape.
        """
        x, inner = add_norm(x, self.attn(normed, rotation), self.norm2)
        return add_norm(x, self.mlp(inner), after)


class Merger(nn.Module):
    """Patches of a block to one token. is_joined_first: the norm sees the whole block, not each patch."""

    def __init__(self, sizes: VisionSizes, *, is_joined_first: bool) -> None:
        super().__init__()
        self.joined = sizes.width * sizes.merge**2
        self.ln_q = nn.LayerNorm(self.joined if is_joined_first else sizes.width, 1e-6)
        self.mlp = nn.ModuleList([nn.Linear(self.joined, self.joined), nn.GELU(), nn.Linear(self.joined, sizes.output)])

    def of_normed(self, normed: Tensor) -> Tensor:
        """Return [S, tokens, output]. normed: [S, patches, width], or [S, tokens, joined], after the norm."""
        x = normed.reshape(len(normed), -1, self.joined)
        for part in self.mlp:
            x = part(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Return [S, tokens, output]. x: [S, patches, width]."""
        return self.of_normed(self.ln_q(x.reshape(len(x), -1, self.ln_q.normalized_shape[0])))


@dataclass(frozen=True, slots=True)
class _Media:
    """The patches of one request. patches: [frames, patches per frame, values]."""

    patches: Tensor
    grid: Grid


class VisionEncoder(nn.Module, CapturesFunction):
    """The vision encoder. Grids and token ids stay on the host, which lays out the result.

    Cost model: frames with the same number of patches are one batch, whatever their sides. On CUDA requests share it.
    """

    host_ports = ("grid", "tokens")
    listed_ports = ("pixels", "sound")
    device_outputs = ("embeds", "deepstack")

    def __init__(self, config: OmniConfig) -> None:
        super().__init__()
        sizes = config.vision
        self.sizes = sizes
        self.ids: TextIds = config.ids
        self.patch_embed = PatchEmbed(sizes)
        self.pos_embed = nn.Embedding(sizes.positions, sizes.width)
        self.blocks = nn.ModuleList(VisionBlock(sizes) for _ in range(sizes.layers))
        self.merger = Merger(sizes, is_joined_first=False)
        self.merger_list = nn.ModuleList(Merger(sizes, is_joined_first=True) for _ in sizes.deepstack)
        self._resize = PixelResize()
        self._replayed = CapturedFunction(self.encode_frames, CAPTURED)

    # -- the node ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        *,
        pixels: Sequence[Tensor],
        grid: np.ndarray | Sequence[np.ndarray],
        tokens: np.ndarray | Sequence[np.ndarray],
        sound: Sequence[Tensor] | None = None,
    ) -> dict[str, list[Tensor]]:
        """Encode one image or video per request.

        pixels: per request [p, values], uint8, or floats in [-1, 1]; or a decoded image, uint8 [y, x, 3], which is
        resized to its grid. grid: frames, rows and columns of patches, [3].
        tokens: ids [n] on the host. sound: vectors [a, output] of the audio pads among the tokens.
        Returns {"embeds": B tensors [n, output], "deepstack": B tensors [levels, n, output]} in token order; deepstack
        is zero at audio pads. Raises EngineError if tokens, pixels or sound do not fit each other.
        """
        grids: list[Grid] = [(int(sizes[0]), int(sizes[1]), int(sizes[2])) for sizes in grid]
        media = [self._media(patches, size) for patches, size in zip(pixels, grids, strict=True)]
        vectors = self._encoded(media)
        sounds = [None] * len(media) if sound is None else list(sound)
        pairs = [
            self._in_token_order(np.asarray(ids), encoded, heard)
            for ids, encoded, heard in zip(tokens, vectors, sounds, strict=True)
        ]
        return {"embeds": [embeds for embeds, _ in pairs], "deepstack": [maps for _, maps in pairs]}

    def _media(self, pixels: Tensor, grid: Grid) -> _Media:
        frames, height, width = grid
        if pixels.dim() == IMAGE_AXES:
            side, merge = self.sizes.patch, self.sizes.merge
            resized = self._resize(pixels.permute(2, 0, 1).contiguous(), height * side, width * side)
            pixels = patches_of_image(resized, side, merge)
        if len(pixels) != frames * height * width or height % self.sizes.merge or width % self.sizes.merge:
            raise EngineError(
                f"{len(pixels)} patches do not fill a grid of {frames} x {height} x {width}",
                f"sides must be multiples of {self.sizes.merge}",
                "check the processor",
                node="vision_encoder",
            )
        return _Media(pixels.unflatten(0, (frames, height * width)), grid)

    def _encoded(self, media: list[_Media]) -> list[Tensor]:
        """Return vectors and feature maps of each request: [tokens, 1 + levels, output]."""
        is_alone = media[0].patches.device.type == "cpu"  # so that a request's bits do not depend on the others
        groups: dict[object, list[int]] = {}
        for index, medium in enumerate(media):
            groups.setdefault(index if is_alone else medium.patches.shape[1], []).append(index)
        encoded: dict[int, Tensor] = {}
        for chosen in groups.values():
            batch = self._batch([media[index] for index in chosen])
            encoded |= dict(zip(chosen, batch, strict=True))
        return [encoded[index].flatten(0, 1) for index in range(len(media))]

    def _batch(self, media: list[_Media]) -> list[Tensor]:
        """Encode requests whose frames have the same number of patches: [frames, tokens, 1 + levels, output] each."""
        side = round(self.sizes.positions**0.5)
        places = [places_of(*medium.grid[1:], self.sizes.merge, side) for medium in media]
        frames, patches = [medium.grid[0] for medium in media], [medium.patches for medium in media]
        grid_places = upload(torch.stack(places), patches[0].device)
        where = torch.cat([place.expand(count, -1, -1) for place, count in zip(grid_places, frames, strict=True)])
        together = torch.cat(patches) if len(patches) > 1 else patches[0]
        step = max(1, MOST_PATCHES // together.shape[1])
        outputs = [self._replayed(*pair) for pair in zip(together.split(step), where.split(step), strict=True)]
        return list((torch.cat(outputs) if len(outputs) > 1 else outputs[0]).split(frames))

    def _in_token_order(self, ids: np.ndarray, vectors: Tensor, sound: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return vectors [n, output] and maps [levels, n, output] in the order of the tokens."""
        is_sound = ids == self.ids.audio_pad
        heard, seen = int(is_sound.sum()), int(((ids == self.ids.image_pad) | (ids == self.ids.video_pad)).sum())
        expected = 0 if sound is None else len(sound)
        if heard != expected or seen != len(vectors) or heard + seen != len(ids):
            raise EngineError(
                f"{len(ids)} tokens hold {seen} vision and {heard} audio pads for {len(vectors)} vision and {expected} "
                "audio vectors",
                hint="a media segment has one pad per vector and no other ids",
                node="vision_encoder",
            )
        if sound is not None and heard:
            order = np.where(is_sound, seen + is_sound.cumsum() - 1, (~is_sound).cumsum() - 1)
            blank = vectors.new_zeros(heard, vectors.shape[1] - 1, vectors.shape[2])
            behind = torch.cat([sound.to(vectors.dtype)[:, None], blank], dim=1)
            vectors = torch.cat([vectors, behind])[upload(torch.from_numpy(order), vectors.device)]
        both = vectors.transpose(0, 1).contiguous()
        return both[0], both[1:]

    # -- encoding ----------------------------------------------------------------------------------------------------

    def encode_frames(self, patches: Tensor, places: Tensor) -> Tensor:
        """Encode frames: vectors and feature maps, [S, tokens, 1 + levels, output].

        patches: uint8 or floats [S, p, values]. places: float32 [S, p, 4], see `places_of`.
        """
        row, column, table_row, table_column = places.unbind(-1)
        x = self.patch_embed(self.normalised(patches)) + resampled(self.pos_embed.weight, table_row, table_column)
        rotation = rotation_of(row.flatten(), column.flatten(), self.sizes.width // self.sizes.heads)
        blocks = cast("list[VisionBlock]", list(self.blocks))
        norms = [*(block.norm1 for block in blocks[1:]), self.merger.ln_q]
        deep = dict(zip(self.sizes.deepstack, self.merger_list, strict=True))
        maps, normed = [], blocks[0].norm1(x)
        for number, (block, after) in enumerate(zip(blocks, norms, strict=True)):
            x, normed = block(x, normed, rotation, after)
            if number in deep:
                maps.append(deep[number](x))
        return torch.stack([self.merger.of_normed(normed), *maps], dim=2)

    def normalised(self, patches: Tensor) -> Tensor:
        """Return patches in the model's dtype: bytes become (x / 255 - 0.5) / 0.5."""
        dtype = self.patch_embed.proj.weight.dtype
        if patches.dtype != torch.uint8:
            return patches.to(dtype)
        return ((patches.float() / 255.0 - 0.5) / 0.5).to(dtype)

    # -- CUDA graphs -------------------------------------------------------------------------------------------------

    def capture(self, captures: GraphCache) -> None:
        """Use CUDA graphs for small batches. Called once the weights are loaded."""
        self._replayed = CapturedFunction(
            self.encode_frames, CAPTURED, captures, lambda shape: shape[0] * shape[1] <= MOST_CAPTURED
        )

    def warmup_requests(self) -> Sequence[WarmupRequest]:
        """See NodeModule: images of usual sizes, a little smaller than their grids, so that they are resized."""
        steps = []
        for height, width in WARM_GRIDS:
            pads = torch.full((height * width // self.sizes.merge**2,), self.ids.image_pad)
            lines, columns = (count * self.sizes.patch - self.sizes.patch // 2 for count in (height, width))
            pixels = torch.zeros(lines, columns, 3, dtype=torch.uint8)
            inputs = {"pixels": pixels, "grid": torch.tensor([1, height, width]), "tokens": pads}
            steps.append(WarmupStep(inputs=inputs, outputs=("embeds", "deepstack")))
        return [WarmupRequest(title="images", tokens=4096, steps=tuple(steps), is_value_free=True)]
