"""The video encoder, and the node `video_encoder` of both models. Run by the stateless engine."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn.functional import layer_norm, linear

from mstar_core.engine.cuda_graphs.functions import CapturedFunction
from mstar_core.engine.module import CapturesFunction, NodeModule
from mstar_vjepa2.checkpoint.config import MEAN, STD
from mstar_vjepa2.nodes.blocks import stack, sum_norm
from mstar_vjepa2.nodes.rotary import Rotary3D
from mstar_vjepa2.params import POOLINGS

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import GraphCache
    from mstar_core.engine.cuda_graphs.compilation import Compiling
    from mstar_vjepa2.checkpoint.config import EncoderConfig

LATENT_EPS: Final = 1e-5
"""Epsilon of the weightless norm of AC latents. It differs from that of the blocks."""

CAPTURED: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Batch sizes, in frames or clips, with a CUDA graph."""

MOST_TOKENS: Final = 4096
"""Maximum patches of a captured batch. Larger batches have long kernels that hide launch overhead."""

POOLS: Final = frozenset(POOLINGS.index(name) for name in ("mean", "mean_space"))
MEAN_SPACE: Final = POOLINGS.index("mean_space")


class PatchEmbed(nn.Module):
    """Embedding of pixel cubes. The non-overlapping convolution is computed as one GEMM."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.tube = (config.tubelet, config.patch, config.patch)
        self.proj = nn.Conv3d(config.channels, config.vit.width, self.tube, stride=self.tube)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return [B, N, width], frame by frame, row by row. pixels: floats [B, F, 3, H, W], F at least a tubelet."""
        tubelet, patch, _ = self.tube
        x = pixels.to(self.proj.weight.dtype)
        frames, rows, columns = x.shape[1] // tubelet, x.shape[-2] // patch, x.shape[-1] // patch
        x = x[:, : frames * tubelet].reshape(x.shape[0], frames, tubelet, -1, rows, patch, columns, patch)
        x = x.permute(0, 1, 4, 6, 3, 2, 5, 7).flatten(4).flatten(1, 3)
        return linear(x, self.proj.weight.flatten(1), self.proj.bias)


class Encoder(nn.Module, CapturesFunction):
    """Encoder of pixels to one vector per patch and tubelet."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        vit = config.vit
        self.patch_embed = PatchEmbed(config)
        self.blocks = stack(vit)
        self.norm = nn.LayerNorm(vit.width, vit.eps)
        self.rotary = Rotary3D(vit.width // vit.heads)
        mean, std = (torch.tensor(values, dtype=torch.float32).view(3, 1, 1) * 255 for values in (MEAN, STD))
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)
        self._replayed = CapturedFunction(self.hidden, CAPTURED)

    mean: Tensor
    std: Tensor

    def capture(self, captures: GraphCache) -> None:
        """Use CUDA graphs for small batches."""
        self._replayed = CapturedFunction(
            self.hidden, CAPTURED, captures, lambda shape: self._tokens(shape) <= MOST_TOKENS
        )

    def warm_up(self) -> None:
        """Run one tubelet, so that kernels are compiled and loaded before the first request."""
        config = self.config
        shape = (1, config.tubelet, config.channels, config.crop, config.crop)
        self.hidden(torch.zeros(shape, dtype=torch.uint8, device=self.mean.device))

    def forward(self, pixels: Tensor, keep: Collection[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """Encode clips.

        pixels: [B, F, 3, H, W], normalised floats or uint8 of 0 to 255. A clip shorter than a tubelet is repeated to
        fill it; trailing frames that fill no tubelet are dropped. keep: block numbers whose outputs are returned, 0 =
        patches. Returns the normed vectors [B, N, width] and the kept outputs by number, not normed.
        """
        return self._through(pixels, keep) if keep else (self._replayed(pixels), {})

    def hidden(self, pixels: Tensor) -> Tensor:
        """Return the normed vectors [B, N, width]. pixels: as in forward."""
        return self._through(pixels, ())[0]

    def _tokens(self, shape: tuple[int, ...]) -> int:
        """Return the patches of a batch of pixels of this shape."""
        count, frames, _, height, width = shape
        tubelets = max(1, frames // self.config.tubelet)
        return count * tubelets * (height // self.config.patch) * (width // self.config.patch)

    def _through(self, pixels: Tensor, keep: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        x = self.patches(pixels)
        rows, columns = pixels.shape[-2] // self.config.patch, pixels.shape[-1] // self.config.patch
        rotation = self.rotary.of_ids(torch.arange(x.shape[1], device=x.device), rows, columns)
        kept, branch = {0: x} if 0 in keep else {}, None
        for number, block in enumerate(self.blocks, start=1):
            x, branch = block(x, branch, rotation)
            if number in keep:
                kept[number] = branch.added(x)
        return sum_norm(x, branch, self.norm)[1], kept

    def patches(self, pixels: Tensor) -> Tensor:
        """Return patch embeddings [B, N, width]. pixels: as in forward."""
        x = self.normalised(pixels) if pixels.dtype == torch.uint8 else pixels
        if x.shape[1] < self.config.tubelet:
            x = x.repeat(1, self.config.tubelet, 1, 1, 1)
        embedded: Tensor = self.patch_embed(x)
        return embedded

    def normalised(self, pixels: Tensor) -> Tensor:
        """Normalise uint8 pixels [..., 3, H, W] with the training's mean and standard deviation. Returns float32."""
        return (pixels.float() - self.mean) / self.std


def latents_of(hidden: Tensor, is_needed: Tensor) -> Tensor:
    """Return encoder or predictor outputs as float32 AC latents, normed without weights if wanted.

    hidden: [B, ..., width]. is_needed: bool [B], or numbers where 0 is False.
    """
    if hidden.is_cuda and len(is_needed) == len(hidden):
        values = hidden.contiguous().view(1, len(hidden), -1, hidden.shape[-1])
        latents: Tensor = importlib.import_module("mstar_vjepa2.kernels.embed_head").latents(
            values, None, is_needed, LATENT_EPS
        )
        return latents.view(hidden.shape)
    plain = hidden.float()
    normed = layer_norm(plain, plain.shape[-1:], eps=LATENT_EPS)
    return torch.where(is_needed.bool().view(-1, *[1] * (plain.dim() - 1)), normed, plain)


class _EncoderNode(nn.Module, NodeModule):
    """Base of the encoder nodes. Forwards the engine's calls to the encoder."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)

    def idle(self) -> bool:
        """Capture the next bucket of the encoder. Returns whether there was one."""
        return self.encoder.idle()

    def counters(self) -> dict[str, float]:
        """Return the counters of the encoder's CUDA graphs."""
        return self.encoder.counters()

    def trace(self, compiling: Compiling) -> None:
        """Run the kernels of the encoder."""
        self.warm_up()

    def warm_up(self) -> None:
        """Warm up the encoder."""
        self.encoder.warm_up()


class ClipEncoder(_EncoderNode):
    """The node of V-JEPA 2: encodes whole clips. Outputs to the client are float32."""

    host_ports = ("layers", "pooling")

    def forward(
        self, *, pixel_values_videos: Tensor, pooling: Tensor | None = None, layers: Tensor | None = None
    ) -> dict[str, Tensor | list[Tensor | None]]:
        """Encode a batch of clips of one shape.

        pixel_values_videos: [B, F, 3, H, W], as for `Encoder`. pooling: index into POOLINGS [B]; None if another node
        reads the output. layers: int64 [B, l], on the host. Returns encoder_hidden [B, N, width]; with a pooling or
        layers, instead of it, pooled ([width], or [T, width] for mean_space) and layer_hidden [l, N, width].
        """
        chosen = [] if layers is None else layers.tolist()
        hidden, kept = self.encoder(pixel_values_videos, {number for numbers in chosen for number in numbers})
        if pooling is None:
            return {"encoder_hidden": hidden}
        outputs: dict[str, Tensor | list[Tensor | None]] = {}
        plain = hidden.float()
        if chosen:
            of_clips = [
                torch.stack([kept[number][index].float() for number in numbers]) for index, numbers in enumerate(chosen)
            ]
            outputs["layer_hidden"] = torch.stack(of_clips)
        how = pooling.tolist()
        if POOLS.intersection(how):
            outputs["pooled"] = [self._pooled(plain[index], kind) for index, kind in enumerate(how)]
        if not chosen and not POOLS.issuperset(how):
            outputs["encoder_hidden"] = [
                None if kind in POOLS else hidden for kind, hidden in zip(how, plain.unbind(), strict=True)
            ]
        return outputs

    def _pooled(self, hidden: Tensor, kind: int) -> Tensor | None:
        if kind not in POOLS:
            return None
        if kind == MEAN_SPACE:
            return hidden.view(-1, self.encoder.config.frame_tokens, hidden.shape[-1]).mean(1)
        return hidden.mean(0)


class FrameEncoder(_EncoderNode):
    """The node of V-JEPA 2-AC: encodes each frame alone, repeated to fill a tubelet. Latents are float32."""

    def forward(
        self,
        *,
        pixel_values_videos: Tensor,
        normalize_reps: Tensor,
        goal_frame: Tensor | None = None,
        goal_latents: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Encode frames, and the goal in the same pass.

        pixel_values_videos: [B, t, 3, H, W]; goal_frame: [B, 1, 3, H, W]; goal_latents: [B, S, width], returned as they
        are; normalize_reps: [B]. Returns encoder_hidden [B, t, S, width] and, with a goal, goal [B, S, width].
        """
        frames = pixel_values_videos if goal_frame is None else torch.cat([pixel_values_videos, goal_frame], dim=1)
        hidden, _ = self.encoder(frames.flatten(0, 1)[:, None])
        latents = latents_of(hidden.unflatten(0, frames.shape[:2]), normalize_reps)
        count = pixel_values_videos.shape[1]
        outputs = {"encoder_hidden": latents[:, :count]}
        if goal_frame is not None:
            outputs["goal"] = latents[:, count]
        elif goal_latents is not None:
            outputs["goal"] = goal_latents.float()
        return outputs
