"""Sound to states: the spectrogram of a recording, and the encoder of its windows. Both batch over requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn.functional import gelu, pad

from mstar_core.engine.cuda_graphs.functions import CapturedFunction
from mstar_core.engine.module import CapturesFunction, WarmupRequest, WarmupStep
from mstar_core.families.mel import LogMel
from mstar_core.layers import BlockSpec, EncoderBlock
from mstar_whisper.checkpoint.config import HOP

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import GraphCache
    from mstar_whisper.checkpoint.config import WhisperConfig


WINDOWS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Batch sizes with a CUDA graph. Uncaptured, the launches of 32 layers keep the host from decoding meanwhile."""


class Spectrogram(nn.Module):
    """Log-mel frames of whole recordings. A recording shorter than a window is filled up with silence first."""

    device_outputs = ("mel",)

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self._least = config.frames * HOP
        self._mel = LogMel(config.bins)

    def forward(self, *, pcm: Tensor | list[Tensor]) -> dict[str, list[Tensor]]:
        """Return {"mel": float32 [frames, bins] each}. pcm: float32 [samples] each, at 16 kHz."""
        clips = [pad(clip, (0, max(0, self._least - len(clip)))) for clip in pcm]
        spectra = self._mel(clips)
        return {"mel": [one[: len(clip) // HOP].contiguous() for one, clip in zip(spectra, clips, strict=True)]}


class Encoder(nn.Module, CapturesFunction):
    """Windows of spectrograms to states. On CUDA the windows of a batch are encoded by one graph."""

    host_ports = ("place",)
    device_outputs = ("states",)

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self._frames = config.frames
        self.conv1 = nn.Conv1d(config.bins, config.width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(config.width, config.width, kernel_size=3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.states, config.width)
        spec = BlockSpec(width=config.width, heads=config.encoder_heads, inner=config.encoder_mlp, key_bias=False)
        self.layers = nn.ModuleList(EncoderBlock(spec) for _ in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(config.width)
        self._replayed = CapturedFunction(self.encoded, WINDOWS)

    def capture(self, captures: GraphCache) -> None:
        """Use CUDA graphs. Called once the weights are loaded."""
        self._replayed = CapturedFunction(self.encoded, WINDOWS, captures)

    def join(self) -> None:
        """Join the projections of each layer. Called once the weights are loaded."""
        for layer in self.layers:
            assert isinstance(layer, EncoderBlock)
            layer.self_attn.join()

    def warmup_requests(self) -> Sequence[WarmupRequest]:
        """See NodeModule: one window, whose shape all windows have."""
        mel = torch.zeros(self._frames, self.conv1.in_channels)
        step = WarmupStep(inputs={"mel": mel, "place": torch.tensor([0, self._frames])}, outputs=("states",))
        return [WarmupRequest(title="a window of sound", tokens=1, steps=(step,), is_value_free=True)]

    def forward(self, *, mel: Tensor | list[Tensor], place: np.ndarray | Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Return {"states": [B, states, width]}.

        mel: [frames, bins] each. place: first frame and number of frames of each window, [B, 2].
        """
        windows = [self._window(spectrum, *each.tolist()) for spectrum, each in zip(mel, place, strict=True)]
        return {"states": self._replayed(torch.stack(windows).to(self.conv1.weight.dtype))}

    def encoded(self, windows: Tensor) -> Tensor:
        """Return states [B, frames / 2, width]. windows: [B, frames, bins], of a whole window or its start."""
        x = gelu(self.conv2(gelu(self.conv1(windows.transpose(1, 2)))))
        # Otherwise every residual keeps the layout of the convolution, and each norm copies it.
        x = x.transpose(1, 2).contiguous()
        x = x + self.embed_positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        states: Tensor = self.layer_norm(x)
        return states

    def _window(self, mel: Tensor, first: int, count: int) -> Tensor:
        part = mel[first : first + min(count, self._frames)]
        return pad(part, (0, 0, 0, self._frames - len(part)))
