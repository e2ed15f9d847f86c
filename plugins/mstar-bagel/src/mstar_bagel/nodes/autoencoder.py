"""The FLUX.1 autoencoder, and the nodes `vae_encoder` and `vae_decoder`. Modules are nested like the checkpoint's keys.

Images of equal size could share a convolution, but its algorithm may then differ. Each runs alone, so that results do
not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import nn
from torch.nn.functional import interpolate, pad, scaled_dot_product_attention, silu

from mstar_bagel.nodes.flow import GridTable, TimeEmbedder
from mstar_bagel.nodes.pixels import SignedPixels
from mstar_core.engine.module import NodeModule

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_bagel.checkpoint.config import Autoencoder, Sizes

GROUPS: Final = 32
EPS: Final = 1e-6


class ResidualBlock(nn.Module):
    """Two normalized convolutions and a skip, by a 1 x 1 convolution where the widths differ."""

    def __init__(self, width: int, outer: int) -> None:
        super().__init__()
        self.norm1 = _norm(width)
        self.conv1 = nn.Conv2d(width, outer, 3, padding=1)
        self.norm2 = _norm(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(width, outer, 1) if width != outer else None

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, outer, y, x]. x: [N, width, y, x]."""
        inner = self.conv2(_normalized(self.norm2, self.conv1(_normalized(self.norm1, x))))
        out: Tensor = inner + (x if self.nin_shortcut is None else self.nin_shortcut(x))
        return out


class PixelAttention(nn.Module):
    """Attention with one head among all pixels, and a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.q = nn.Conv2d(width, width, 1)
        self.k = nn.Conv2d(width, width, 1)
        self.v = nn.Conv2d(width, width, 1)
        self.proj_out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape. x: [N, width, y, x]."""
        normed = _normalized(self.norm, x, is_active=False)
        projected = [layer(normed).flatten(2).transpose(1, 2)[:, None] for layer in (self.q, self.k, self.v)]
        mixed = scaled_dot_product_attention(*projected)[:, 0].transpose(1, 2).view(x.shape)
        out: Tensor = x + self.proj_out(mixed)
        return out


class Downsample(nn.Module):
    """Halves the resolution. The padding is one column at the right and one row at the bottom."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(pad(x, (0, 1, 0, 1)))
        return out


class Upsample(nn.Module):
    """Doubles the resolution by the nearest neighbour."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(interpolate(x, scale_factor=2.0, mode="nearest"))
        return out


class Level(nn.Module):
    """Blocks of one resolution, with the change of resolution that follows, if any."""

    def __init__(self, width: int, outer: int, blocks: int) -> None:
        super().__init__()
        widths = [width, *[outer] * (blocks - 1)]
        self.block = nn.ModuleList(ResidualBlock(width, outer) for width in widths)
        self.downsample: Downsample | None = None
        self.upsample: Upsample | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        if self.downsample is not None:
            return cast("Tensor", self.downsample(x))
        return x if self.upsample is None else cast("Tensor", self.upsample(x))


class Middle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block_1 = ResidualBlock(width, width)
        self.attn_1 = PixelAttention(width)
        self.block_2 = ResidualBlock(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block_2(self.attn_1(self.block_1(x)))
        return out


class VaeEncoder(nn.Module):
    """Pixels to mean and log-variance of latents."""

    def __init__(self, vae: Autoencoder) -> None:
        super().__init__()
        widths = [vae.width * multiplier for multiplier in vae.multipliers]
        self.conv_in = nn.Conv2d(3, vae.width, 3, padding=1)
        inner = [vae.width, *widths[:-1]]
        levels = [Level(width, outer, vae.blocks) for width, outer in zip(inner, widths, strict=True)]
        for level, outer in zip(levels[:-1], widths, strict=False):
            level.downsample = Downsample(outer)
        self.down = nn.ModuleList(levels)
        self.mid = Middle(widths[-1])
        self.norm_out = _norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 2 * vae.channels, 3, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return [N, 2 * channels, y / 8, x / 8], means first. pixels: [N, 3, y, x] in [-1, 1]."""
        x = self.conv_in(pixels)
        for level in self.down:
            x = level(x)
        out: Tensor = self.conv_out(_normalized(self.norm_out, self.mid(x)))
        return out


class VaeDecoder(nn.Module):
    """Latents to pixels. `up.0` is the full resolution and runs last."""

    def __init__(self, vae: Autoencoder) -> None:
        super().__init__()
        widths = [vae.width * multiplier for multiplier in vae.multipliers]
        self.conv_in = nn.Conv2d(vae.channels, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1])
        above = [*widths[1:], widths[-1]]
        levels = [Level(width, outer, vae.blocks + 1) for width, outer in zip(above, widths, strict=True)]
        for level, outer in zip(levels[1:], widths[1:], strict=True):
            level.upsample = Upsample(outer)
        self.up = nn.ModuleList(levels)
        self.norm_out = _norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        """Return [N, 3, y, x] around [-1, 1]. latents: [N, channels, y / 8, x / 8], unscaled."""
        x = self.mid(self.conv_in(latents))
        for level in reversed(self.up):
            x = level(x)
        out: Tensor = self.conv_out(_normalized(self.norm_out, x))
        return out


class CleanLatents(nn.Module, NodeModule):
    """The node `vae_encoder`: an image to vectors of the LLM, at flow time 0. The latent is the posterior's mean."""

    device_outputs = ("features",)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.language.width
        self.encoder = VaeEncoder(sizes.vae)
        self.vae2llm = nn.Linear(sizes.latent_width, width)
        self.time_embedder = TimeEmbedder(width)
        self.latent_pos_embed = GridTable(sizes.latent_grid, width)
        self.pixels = SignedPixels()
        self._sizes = sizes

    def forward(self, *, image: Tensor | Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Return {"features": one tensor [n, width] per image}. image: [3, y, x] each, uint8 or in [-1, 1]."""
        return {"features": [self.embed(self.encode(picture)) for picture in image]}

    def encode(self, image: Tensor) -> Tensor:
        """Return the scaled latent tokens [h, w, channels]. image: [3, y, x]."""
        vae = self._sizes.vae
        pixels = self.pixels(image)[None].to(self.encoder.conv_in.weight.dtype)
        moments = self.encoder(pixels)[0].to(self.vae2llm.weight.dtype)
        scaled = vae.scale * (moments[: vae.channels] - vae.shift)
        return to_tokens(scaled, self._sizes.latent_patch)

    def use_half_precision(self, dtype: torch.dtype) -> None:
        """Compute the convolutions in this dtype. See `half_precision`."""
        half_precision(self.encoder, dtype)

    def working_bytes(self, tokens: int) -> int:
        """See NodeModule: some tensors of the first level."""
        return _level_bytes(self._sizes, self._sizes.vae.width, self.encoder.conv_in.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [h * w, width] of clean latent tokens."""
        moment = self.time_embedder(tokens.new_zeros(1, dtype=torch.float32))
        out: Tensor = self.vae2llm(tokens.flatten(0, 1)) + moment + self.latent_pos_embed(*tokens.shape[:2])
        return out


class Pixels(nn.Module, NodeModule):
    """The node `vae_decoder`: latent tokens to an 8-bit image."""

    host_outputs = ("image",)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.decoder = VaeDecoder(sizes.vae)
        self._sizes = sizes

    def forward(self, *, latents: Tensor | Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """Return {"image": one tensor uint8 [y, x, 3] per image}. latents: [h, w, channels] each."""
        return {"image": [self.pixels(self.decode(latent)) for latent in latents]}

    def decode(self, tokens: Tensor) -> Tensor:
        """Return [3, y, x] around [-1, 1]. tokens: scaled latents [h, w, channels]."""
        vae = self._sizes.vae
        scaled = from_tokens(tokens, self._sizes.latent_patch) / vae.scale + vae.shift
        pixels: Tensor = self.decoder(scaled[None].to(self.decoder.conv_in.weight.dtype))[0]
        return pixels

    def use_half_precision(self, dtype: torch.dtype) -> None:
        """Compute the convolutions in this dtype. See `half_precision`."""
        half_precision(self.decoder, dtype)

    def working_bytes(self, tokens: int) -> int:
        """See NodeModule: some tensors of the last level, whose input has the width of the level before."""
        vae = self._sizes.vae
        return _level_bytes(
            self._sizes, vae.width * vae.multipliers[min(1, len(vae.multipliers) - 1)], self.decoder.conv_in.weight
        )

    def pixels(self, decoded: Tensor) -> Tensor:
        """Return uint8 [y, x, 3]. Values are truncated, as in the reference."""
        return ((decoded.float() * 0.5 + 0.5).clamp(0, 1) * 255).to(torch.uint8).permute(1, 2, 0).contiguous()


def half_precision(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast an encoder or decoder.

    Statistics of the norms stay float32 in PyTorch's kernels. In bfloat16 a decoded image of the golden set differs
    from float32 by less than one of 255 levels (50 dB).
    """
    module.to(dtype)


def to_tokens(latent: Tensor, patch: int) -> Tensor:
    """Return latent tokens [h, w, patch * patch * channels], channels last in each. latent: [channels, y, x]."""
    channels, height, width = latent.shape
    grid = latent.view(channels, height // patch, patch, width // patch, patch)
    return grid.permute(1, 3, 2, 4, 0).reshape(height // patch, width // patch, patch * patch * channels)


def from_tokens(tokens: Tensor, patch: int) -> Tensor:
    """Return the latent [channels, y, x] of tokens [h, w, patch * patch * channels]."""
    height, width, _ = tokens.shape
    grid = tokens.view(height, width, patch, patch, -1)
    return grid.permute(4, 0, 2, 1, 3).reshape(-1, height * patch, width * patch)


def _level_bytes(sizes: Sizes, width: int, weight: Tensor) -> int:
    """Return the bytes of four tensors of the largest image with so many channels, in the weight's dtype."""
    side = sizes.latent_grid * sizes.token_pixels
    return 4 * side * side * width * weight.element_size()


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, width, EPS)


def _normalized(norm: nn.GroupNorm, x: Tensor, *, is_active: bool = True) -> Tensor:
    """Return norm(x), with its SiLU if `is_active`."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        from mstar_bagel.nodes.group_norm import group_norm

        return group_norm(x.contiguous(), norm, is_active=is_active)
    normed: Tensor = norm(x)
    return silu(normed) if is_active else normed
