"""Sound to states: the spectrogram of a recording, and the encoder of its windows. Both batch over requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import gelu, pad, scaled_dot_product_attention

from mstar_core.families.mel import LogMel
from mstar_whisper.checkpoint.config import HOP
from mstar_whisper.nodes.layers import FeedForward, Projections

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mstar_whisper.checkpoint.config import WhisperConfig


class Spectrogram(nn.Module):
    """Log-mel frames of whole recordings. A recording shorter than a window is filled up with silence first."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self._least = config.frames * HOP
        self._mel = LogMel(config.bins)

    def forward(self, *, pcm: Tensor | list[Tensor]) -> dict[str, list[Tensor]]:
        """Return {"mel": float32 [frames, bins] each}. pcm: float32 [samples] each, at 16 kHz."""
        clips = [pad(clip, (0, max(0, self._least - len(clip)))) for clip in pcm]
        spectra = self._mel(clips)
        return {"mel": [one[: len(clip) // HOP].contiguous() for one, clip in zip(spectra, clips, strict=True)]}


class EncoderLayer(FeedForward):
    """Self-attention over all states of a window, then an MLP."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__(config.width, config.encoder_mlp)
        self.self_attn = Projections(config.width, config.encoder_heads)
        self.self_attn_layer_norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, [B, states, width]."""
        normed = self.self_attn_layer_norm(x)
        keys, values = self.self_attn.keys_and_values(normed)
        query, key, value = (part.transpose(1, 2) for part in (self.self_attn.queries(normed), keys, values))
        attended = scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return self.after_attention(x + self.self_attn.out(attended))


class Encoder(nn.Module):
    """Windows of spectrograms to states."""

    host_ports = ("start",)

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self._frames = config.frames
        self.conv1 = nn.Conv1d(config.bins, config.width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(config.width, config.width, kernel_size=3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.states, config.width)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(config.width)

    def forward(self, *, mel: Tensor | list[Tensor], start: np.ndarray | Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return {"states": [B, states, width]}.

        mel: [frames, bins] each. start: first frame of each window, [B, 1].
        """
        windows = [self._window(spectrum, int(first[0])) for spectrum, first in zip(mel, start, strict=True)]
        x = torch.stack(windows).to(self.conv1.weight.dtype).transpose(1, 2)
        x = gelu(self.conv2(gelu(self.conv1(x)))).transpose(1, 2) + self.embed_positions.weight
        for layer in self.layers:
            x = layer(x)
        return {"states": self.layer_norm(x)}

    def _window(self, mel: Tensor, first: int) -> Tensor:
        part = mel[first : first + self._frames]
        return pad(part, (0, 0, 0, self._frames - len(part)))
