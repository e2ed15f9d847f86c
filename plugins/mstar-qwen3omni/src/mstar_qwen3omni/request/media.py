"""Media of a prompt: pads in token order, encoder inputs and the data for positions. Used by the processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mstar_qwen3omni.checkpoint.config import AudioSizes, OmniConfig, VisionSizes
from mstar_qwen3omni.program import CONTINUES
from mstar_qwen3omni.request.images import patch_grid
from mstar_qwen3omni.request.positions import Grid, PositionCounter, interleave
from mstar_qwen3omni.request.sound_windows import sound_windows
from mstar_qwen3omni.request.sounds import mel_frames, sound_tokens

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Positions = npt.NDArray[np.float32]
    Indices = npt.NDArray[np.int64]

Kind = Literal["audio", "image", "video", "audio_video"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """One medium. tokens: its pads, int64 [n]. arrays: inputs of its encoders, by name.

    grid: of a picture or video. is_sound: of a video with sound, true at the pads of the sound. content: key of the
    file and the options that determine the encoder inputs. windows: parts that are read one after the other, in place
    of the whole; empty for a medium that is read as a whole.
    """

    kind: Kind
    tokens: Indices
    arrays: Mapping[str, Array]
    grid: Grid | None = None
    is_sound: npt.NDArray[np.bool_] | None = None
    content: bytes = b""
    windows: tuple[Media, ...] = ()

    def place(self, counter: PositionCounter) -> Positions | None:
        """Advance the thinker's positions past this medium. Returns [3, n], or None for consecutive ones."""
        if self.grid is None:
            return counter.run(len(self.tokens))
        if self.is_sound is None:
            return counter.picture(self.grid)
        return counter.heard_video(self.grid, self.is_sound)

    def place_for_talker(self, counter: PositionCounter) -> Positions | None:
        """Advance the talker's positions. A video with sound has consecutive ones there (specification section 10)."""
        if self.grid is None or self.is_sound is not None:
            return counter.run(len(self.tokens))
        return counter.picture(self.grid)

    @property
    def counts(self) -> dict[str, int]:
        """Tokens by modality."""
        if self.is_sound is None:
            return {self.kind: len(self.tokens)}
        sounds = int(np.count_nonzero(self.is_sound))
        return {"video": len(self.tokens) - sounds, "audio": sounds}


def sound_media(audio: Array, config: OmniConfig) -> Media:
    """Return a sound. audio: float32 [1, samples] at 16 kHz, or mel frames [bins, f]."""
    return Media(
        kind="audio", tokens=_pads(config.ids.audio_pad, tokens_of(audio, config.audio)), arrays={"audio": audio}
    )


def windowed_sound(samples: Array, config: OmniConfig) -> Media:
    """Return a sound whose attention windows are read and cached one by one. samples: float32 [1, s] at 16 kHz.

    A sound of one window is read as a whole.
    """
    sizes, whole = config.audio, sound_media(samples, config)
    if mel_frames(samples.shape[1]) <= sizes.window:
        return whole
    windows = tuple(
        Media(
            kind="audio",
            tokens=_pads(config.ids.audio_pad, sound_tokens(frames.shape[1], sizes)),
            arrays={"audio": frames, CONTINUES: np.array([number > 0])},
            content=key,
        )
        for number, (frames, key) in enumerate(sound_windows(samples, sizes.mel_bins, sizes.window))
    )
    return replace(whole, arrays={}, windows=windows)


def picture_media(pixels: Array, grid: Grid, config: OmniConfig) -> Media:
    """Return an image. pixels: patches [p, values], or as decoded, [y, x, 3]."""
    arrays = _seen(pixels, grid, config.vision)
    return Media(kind="image", tokens=_pads(config.ids.image_pad, grid.tokens), arrays=arrays, grid=grid)


def video_media(pixels: Array, grid: Grid, config: OmniConfig, audio: Array | None = None) -> Media:
    """Return a video, with its sound if `audio` is given. pixels: patches [p, values]."""
    arrays = _seen(pixels, grid, config.vision)
    if audio is None:
        return Media(kind="video", tokens=_pads(config.ids.video_pad, grid.tokens), arrays=arrays, grid=grid)
    is_sound = interleave(grid, tokens_of(audio, config.audio))
    tokens = np.where(is_sound, config.ids.audio_pad, config.ids.video_pad).astype(np.int64)
    return Media(kind="audio_video", tokens=tokens, arrays={**arrays, "audio": audio}, grid=grid, is_sound=is_sound)


def tokens_of(audio: Array, sizes: AudioSizes) -> int:
    """Return the number of tokens of samples [1, s] or mel frames [bins, f]."""
    frames = mel_frames(audio.shape[1]) if audio.shape[0] == 1 else audio.shape[1]
    return sound_tokens(frames, sizes)


def _seen(pixels: Array, grid: Grid, sizes: VisionSizes) -> dict[str, Array]:
    return {"pixels": pixels, "grid": patch_grid(grid, sizes)}


def _pads(pad: int, count: int) -> Indices:
    return np.full(count, pad, dtype=np.int64)
