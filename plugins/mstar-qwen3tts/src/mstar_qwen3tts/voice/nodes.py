"""Nodes of voice cloning: `VoiceEncoder`, whose outputs are reused for equal recordings, and `VoicePrompt`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import nn

from mstar_core.errors import WeightsError
from mstar_qwen3tts.request.prompt import FRAME, SPEAKER
from mstar_qwen3tts.voice.encoder import CodecEncoder
from mstar_qwen3tts.voice.mel import log_mel
from mstar_qwen3tts.voice.speaker import SpeakerEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    Samples = npt.NDArray[np.float32]

    from mstar_qwen3tts.checkpoint.config import TTSConfig

RECENT: Final = 8
"""Clips whose outputs the encoder keeps, about 10 kB each."""


class VoiceEncoder(nn.Module):
    """A recording to the speaker's vector and the frames of codes. Parameters as in both files of the checkpoint."""

    host_ports = ("audio",)
    device_outputs = ("speaker", "frames")

    def __init__(self, config: TTSConfig) -> None:
        super().__init__()
        if config.speaker is None:
            raise WeightsError("the checkpoint has no speaker encoder", hint="clone voices with a Base checkpoint")
        self.bins = config.speaker.mel
        self.speaker_encoder = SpeakerEncoder(config.speaker)
        self.encoder = CodecEncoder(config.encoder)
        self._recent: dict[bytes, tuple[Tensor, Tensor]] = {}  # the oldest first

    def forward(self, *, audio: Sequence[Samples]) -> dict[str, list[Tensor]]:
        """Return speaker [width] and frames int64 [frames, groups] of each clip. audio: float32 [1, n] each, 24 kHz."""
        made = [self._encoded(np.asarray(clip, dtype=np.float32).reshape(-1)) for clip in audio]
        return {"speaker": [speaker for speaker, _ in made], "frames": [frames for _, frames in made]}

    def _encoded(self, clip: Samples) -> tuple[Tensor, Tensor]:
        """Encode a clip, unless it is a recent one: a new voice comes twice, for its prompt and for its codec state."""
        key = hashlib.blake2b(clip.tobytes(), digest_size=16).digest()
        found = self._recent.pop(key, None)
        if found is None:
            samples = torch.from_numpy(clip).to(next(self.parameters()).device)
            found = self.speaker_encoder(log_mel(samples, self.bins)).float(), self.encoder(samples)
        self._recent[key] = found
        while len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        return found


class VoicePrompt(nn.Module):
    """Puts the outputs of the voice encoder at their rows of the prompt. Has no weights."""

    listed_ports = ("prompt", "speaker", "frames")
    device_outputs = ("rows", "embeds")

    def __init__(self, config: TTSConfig) -> None:
        super().__init__()
        self.width = config.talker.width

    def forward(self, *, prompt: list[Tensor], speaker: list[Tensor], frames: list[Tensor]) -> dict[str, list[Tensor]]:
        """Return rows int64 [n, 1 + groups] and embeds [n, width] of each prompt. prompt: see `request.prompt`."""
        made = [_placed(*each) for each in zip(prompt, speaker, frames, strict=True)]
        return {"rows": [rows for rows, _ in made], "embeds": [embeds for _, embeds in made]}


def _placed(prompt: Tensor, speaker: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
    first = prompt[:, 1:2]
    embeds = (first == SPEAKER) * speaker
    # Row FRAME - i stands for frame i of the recording.
    index = (FRAME - first[:, 0]).clamp(0, len(frames) - 1)
    codes = torch.where(first <= FRAME, frames[index], prompt[:, 1:].clamp(min=-1))
    return torch.cat([prompt[:, :1], codes], dim=1), embeds
