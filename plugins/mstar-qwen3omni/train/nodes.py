"""The plugin's own modules as they are trained: together, in float32, over padded batches with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from mstar_qwen3omni.encoders.audio import AudioEncoder
from mstar_qwen3omni.encoders.patches import places_of
from mstar_qwen3omni.encoders.vision import VisionEncoder
from mstar_qwen3omni.model import new_module
from mstar_qwen3omni.talker.talker import Talker
from mstar_qwen3omni.thinker.thinker import Thinker
from mstar_qwen3omni.vocoder.code2wav import Code2Wav
from mstar_qwen3omni.world import SIDE

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_qwen3omni.checkpoint.config import OmniConfig

    from .prompts import Batch

EMBEDDING_STD = 0.3
RESIDUAL_SCALE = 0.3
"""First values of Code2Wav's layer scales and gammas."""


class DenseView:
    """A KVView of B sequences of equal length that start empty, with causal attention and gradients."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        wide = (each.unflatten(0, (self._rows, -1)).transpose(1, 2) for each in (query, key, value))
        mixed = scaled_dot_product_attention(*wide, is_causal=True, scale=scale, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(0, 1)


class Nodes(nn.ModuleDict):
    """All nodes by name. The talker's text embedding is the thinker's."""

    def __init__(self, config: OmniConfig) -> None:
        names = ("audio_encoder", "vision_encoder", "Thinker", "Talker", "Code2Wav")
        super().__init__({name: new_module(name, config) for name in names})
        self.config = config
        self.requires_grad_(True)  # heads come without gradients
        for name, value in self.named_parameters():
            if "embed" in name and value.dim() == 2:
                nn.init.normal_(value, std=EMBEDDING_STD)
            elif name.endswith((".gamma", ".scale")):
                nn.init.constant_(value, RESIDUAL_SCALE)
        self.talker.text_embedding.weight = self.thinker.model.embed_tokens.weight

    @property
    def audio(self) -> AudioEncoder:
        return cast("AudioEncoder", self["audio_encoder"])

    @property
    def vision(self) -> VisionEncoder:
        return cast("VisionEncoder", self["vision_encoder"])

    @property
    def thinker(self) -> Thinker:
        return cast("Thinker", self["Thinker"])

    @property
    def talker(self) -> Talker:
        return cast("Talker", self["Talker"])

    @property
    def vocoder(self) -> Code2Wav:
        return cast("Code2Wav", self["Code2Wav"])

    def understood(self, batch: Batch) -> Understood:
        """Run encoders and thinker over a batch."""
        ids, special = batch.ids, self.config.ids
        rows, length = ids.shape
        x = self.thinker.model.embed_tokens(ids.flatten())
        levels = len(self.config.vision.deepstack)
        deep = x.new_zeros(levels, *x.shape)
        flat = ids.flatten()
        seen = heard = None
        if batch.patches is not None:
            side = SIDE // self.config.vision.patch
            table = round(self.config.vision.positions**0.5)
            places = places_of(side, side, self.config.vision.merge, table).to(ids.device)
            made = self.vision.encode_frames(batch.patches, places.expand(len(batch.patches), -1, -1))
            seen = made[:, :, 0]
            is_seen = (flat == special.image_pad) | (flat == special.video_pad)
            where = is_seen.nonzero()[:, 0]
            vectors = made.flatten(0, 1)
            x = x.index_put((where,), vectors[:, 0])
            deep = torch.stack([deep[level].index_put((where,), vectors[:, 1 + level]) for level in range(levels)])
        if batch.mel is not None:
            assert batch.lengths is not None
            found = self.audio.encode_windows(batch.mel, batch.lengths)
            inside = torch.arange(found.shape[1], device=ids.device) < batch.lengths[:, :1]
            heard = (found * inside[..., None]).sum(1) / batch.lengths[:, :1]
            x = x.index_put(((flat == special.audio_pad).nonzero()[:, 0],), found[inside])
        hidden, accepted = self.thinker.model(
            x, batch.positions.flatten(1), DenseView(rows), deep, self.thinker.accept_layer
        )
        return Understood(hidden.unflatten(0, (rows, length)), accepted.unflatten(0, (rows, length)), seen, heard)


class Understood:
    """Result of the thinker. hidden, accepted: [B, T, width]; seen: [frames, tokens, width]; heard: [sounds, width]."""

    def __init__(self, hidden: Tensor, accepted: Tensor, seen: Tensor | None, heard: Tensor | None) -> None:
        self.hidden, self.accepted, self.seen, self.heard = hidden, accepted, seen, heard


def use_plain_operations() -> None:
    """Make all modules of this process take their plain paths, because the CUDA kernels have no gradients.

    The modules choose by `is_cuda`. Products are computed in TF32.
    """
    torch.Tensor.is_cuda = property(lambda self: False)  # type: ignore[assignment,misc]
    torch.set_float32_matmul_precision("high")


def device_of(name: str) -> torch.device:
    """Return a device for training and prepare this process for it. name: `cpu`, `cuda` or `auto`."""
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    if chosen == "cuda":
        use_plain_operations()
    return torch.device(chosen)
