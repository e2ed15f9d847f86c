"""The nodes `vae_encoder` and `vae_decoder`: images to conditions of a video, latents to frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mstar_core.engine.module import NodeModule
from mstar_wan22.nodes.vae import Decoder, Encoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from mstar_wan22.checkpoint.config import Sizes, VaeSizes


def levels(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return pixels 0..255 as values in -1..1."""
    return (pixels.float() / 127.5 - 1).to(dtype)


def pixels(frames: Tensor) -> Tensor:
    """Return frames as truncated uint8 [F, H, W, 3]. frames: [3, F, H, W] in -1..1."""
    return ((frames / 2 + 0.5).clamp(0, 1) * 255).to(torch.uint8).permute(1, 2, 3, 0).contiguous()


class ImageLatents(Encoder, NodeModule):
    """The node `vae_encoder`."""

    host_ports = ("grid",)
    listed_ports = ("image", "last_image")

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes.vae)
        self._is_first_frame = sizes.expands

    def forward(
        self, *, image: Sequence[Tensor], grid: Sequence[np.ndarray], last_image: Sequence[Tensor] | None = None
    ) -> dict[str, Any]:
        """Return {"condition": B tensors}, float32, see `transformer.Denoiser`.

        image, last_image: uint8 [3, height, width]. grid: arrays of which only the shape is read, [frames, rows,
        columns] of the video's latents.
        """
        items = []
        for number, picture in enumerate(image):
            if self._is_first_frame:
                items.append(self.encode(levels(picture, self.dtype)[:, None]))
                continue
            last = None if last_image is None else last_image[number]
            items.append(self.channels(picture, len(grid[number]), last))
        return {"condition": items}

    def channels(self, image: Tensor, frames: int, last: Tensor | None) -> Tensor:
        """Return mask and latents of a grey video with given ends: [frames of a latent + channels, T, h, w].

        frames: of the latents.
        """
        per_latent = self.sizes.frames
        video = torch.zeros(3, (frames - 1) * per_latent + 1, *image.shape[1:], dtype=self.dtype, device=image.device)
        video[:, 0] = levels(image, self.dtype)
        if last is not None:
            video[:, -1] = levels(last, self.dtype)
        latents = self.encode(video)
        mask = latents.new_zeros(per_latent, *latents.shape[1:])
        mask[:, 0] = 1
        if last is not None:
            mask[-1, -1] = 1
        return torch.cat([mask, latents])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the convolutions."""
        return self.quant_conv.weight.dtype


class Frames(Decoder, NodeModule):
    """The node `vae_decoder`: one latent frame per iteration of its loop, whose memory the loop carries."""

    host_ports = ("step",)
    listed_ports = ("latents", "memory", "condition", "estimate")
    host_outputs = ("frames", "image")

    def __init__(self, sizes: VaeSizes, *, expands: bool) -> None:
        super().__init__(sizes)
        self._expands = expands

    def forward(
        self,
        *,
        latents: Sequence[Tensor] = (),
        memory: Sequence[Tensor] = (),
        step: np.ndarray | None = None,
        condition: Sequence[Tensor] | None = None,
        estimate: Sequence[Tensor] | None = None,
    ) -> dict[str, Any]:
        """Return {"frames": B uint8 tensors [F, H, W, 3], "memory"}, or {"image": B uint8 tensors [H, W, 3]}.

        latents: float32 [channels, T, h, w], of which the frame `step` is decoded. memory: what the iteration before
        returned, empty in the first one. condition: latents of the first frame, which replace it. estimate: a latent
        frame [channels, 1, h, w] that is decoded alone, for a preview.
        """
        dtype = self.post_quant_conv.weight.dtype
        if estimate is not None:
            empty = estimate[0].new_empty(0, dtype=dtype)
            return {"image": [pixels(self.chunk(latent, empty)[0])[0] for latent in estimate]}
        assert step is not None
        frames, kept = [], []
        for item, video in enumerate(latents):
            number = int(step[item])
            latent = video[:, number : number + 1]
            if number == 0 and self._expands and condition is not None:
                latent = condition[item].to(latent.dtype)
            shown, after = self.chunk(latent, memory[item].to(dtype))
            frames.append(pixels(shown))
            kept.append(after)
        return {"frames": frames, "memory": kept}
