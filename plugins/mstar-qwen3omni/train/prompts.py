"""Questions as padded batches, laid out by the plugin's own processor code: ids, positions, and the talker's share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.families.mel import LogMel
from mstar_core.families.mel_tables import frames_of
from mstar_core.plugin.chat.turns import Turn
from mstar_qwen3omni.checkpoint.config import PATCH_FRAMES, OmniConfig
from mstar_qwen3omni.program import TALKER_POSITIONS, TALKER_TOKENS
from mstar_qwen3omni.request.chat import SPOKEN_SYSTEM, ChatLayout
from mstar_qwen3omni.request.images import grid_of, patches_of
from mstar_qwen3omni.request.media import Media, picture_media, sound_media, video_media
from mstar_qwen3omni.request.segments import split
from mstar_qwen3omni.request.tokenizer import read_tokenizer
from mstar_qwen3omni.world import RATE, SIDE, Question, draw

from .sounds import Sounds, placed

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

FLICKER: Final = 4.0
"""Standard deviation of the noise on training frames, because clips come from a lossy file."""

PAD: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question as ids. positions: [3, n]; heard: true where the talker reads; heard_positions: [3, heard]."""

    question: Question
    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.float32]
    heard: npt.NDArray[np.bool_]
    heard_positions: npt.NDArray[np.float32]
    media: Media
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one length. ids: prompt, answer and padding, [B, T]; positions: float32 [3, B, T].

    ends: index of the last prompt token, [B]. patches: uint8 [S, p, values] of all frames; mel: float32 [W, chunk,
    bins] of all sounds, and lengths: int64 [W, 2], their tokens and frames.
    """

    rows: tuple[Row, ...]
    ids: Tensor
    positions: Tensor
    ends: Tensor
    patches: Tensor | None
    mel: Tensor | None
    lengths: Tensor | None


class Prompts:
    """Lays out questions. Owned by a training stage."""

    def __init__(self, config: OmniConfig, folder: Path, sounds: Sounds) -> None:
        self.config = config
        tokenizer = read_tokenizer(folder, ())
        self.encode = lru_cache(4096)(lambda text: tuple(tokenizer.encode(text)))
        self._mel = LogMel(config.audio.mel_bins)
        self._of_digit: dict[int, list[int]] = {}
        self._sounds = sounds
        for index, (number, _) in enumerate(sounds.digits):
            self._of_digit.setdefault(number, []).append(index)

    def draw(self, chance: np.random.Generator, count: int, *, spoken: float = 0.5) -> list[Row]:
        """Return random rows. spoken: share of prompts with the system text of spoken answers."""
        return [self.row(draw(chance), chance, is_spoken=chance.random() < spoken) for _ in range(count)]

    def row(self, question: Question, chance: np.random.Generator, *, is_spoken: bool) -> Row:
        """Lay out one question. The medium comes before or after the text by chance."""
        media = self.media(question, chance)
        parts = [(question.kind, 0), ("text", 0)]
        turns = [Turn(role="user", order=parts if chance.random() < 0.7 else parts[::-1])]
        texts = [question.text, SPOKEN_SYSTEM]
        if is_spoken:
            turns.insert(0, Turn(role="system", order=[("text", 1)]))
        special = self.config.ids
        prompt = ChatLayout(special, self.encode, texts.__getitem__, lambda *_: media).write(turns)
        ids = np.asarray(prompt.ids, np.int64)
        segments = split(ids, prompt.media, special, is_spoken=True).inputs
        whole, heard = _Line(), _Line()
        is_heard = []
        for segment in segments:
            count, arrays = segment.length, segment.arrays
            whole.add(count, arrays.get("positions"))
            if segment.kind == "text":
                share = len(arrays.get(TALKER_TOKENS, ()))
                is_heard += [False] * (count - share) + [True] * share
                heard.add(share, None)
            else:
                is_heard += [True] * count
                heard.add(count, arrays.get(TALKER_POSITIONS))
        return Row(
            question=question,
            ids=ids,
            positions=whole.positions,
            heard=np.array(is_heard),
            heard_positions=heard.positions,
            media=media,
            answer=self.encode(question.answer),
        )

    def media(self, question: Question, chance: np.random.Generator) -> Media:
        """Return the medium of a question as the processor makes it from a file."""
        config = self.config
        if question.kind == "audio":
            chosen = self._of_digit[question.digit]
            pcm = self._sounds.digits[chosen[chance.integers(len(chosen))]][1]
            samples = placed(pcm, chance)
            frames = self._mel([torch.from_numpy(samples)])[0][: frames_of(len(samples))]
            return sound_media(frames.t().numpy(), config)
        frames_ = question.frames()
        is_clip = question.kind == "video"
        taken = [noisy(each, chance) for each in (frames_[::2] if is_clip else frames_)]
        fps = RATE / 2
        grid = grid_of(len(taken), SIDE, SIDE, config.vision, PATCH_FRAMES / fps * config.ticks if is_clip else 0.0)
        patches = patches_of(taken, grid, config.vision)
        return video_media(patches, grid, config) if is_clip else picture_media(patches, grid, config)

    def batch(self, rows: Sequence[Row], device: torch.device) -> Batch:
        """Pad rows, with their answers and the stop id, to one length."""
        stop = self.config.ids.im_end
        lines = [np.concatenate([row.ids, row.answer, [stop]]) for row in rows]
        longest = max(map(len, lines))
        ids = np.full((len(rows), longest), PAD, np.int64)
        positions = np.zeros((3, len(rows), longest), np.float32)
        for index, (row, line) in enumerate(zip(rows, lines, strict=True)):
            ids[index, : len(line)] = line
            count = len(row.ids)
            positions[:, index, :count] = row.positions
            positions[:, index, count:] = row.positions.max() + 1 + np.arange(longest - count)
        seen = [row.media.arrays["pixels"] for row in rows if row.media.grid is not None]
        heard = [row.media.arrays["audio"] for row in rows if row.media.grid is None]
        per_frame = (SIDE // self.config.vision.patch) ** 2
        patches = torch.from_numpy(np.concatenate(seen)).unflatten(0, (-1, per_frame)).to(device) if seen else None
        mel = lengths = None
        if heard:
            chunk = self.config.audio.chunk
            mel = torch.zeros(len(heard), chunk, self.config.audio.mel_bins)
            for index, each in enumerate(heard):
                mel[index, : each.shape[1]] = torch.from_numpy(each.T)
            counts = [len(row.media.tokens) for row in rows if row.media.grid is None]
            lengths = torch.tensor([counts, [each.shape[1] for each in heard]]).t().contiguous().to(device)
            mel = mel.to(device)
        return Batch(
            rows=tuple(rows),
            ids=torch.from_numpy(ids).to(device),
            positions=torch.from_numpy(positions).to(device),
            ends=torch.tensor([len(row.ids) - 1 for row in rows], device=device),
            patches=patches,
            mel=mel,
            lengths=lengths,
        )


class _Line:
    """Running positions: given ones, or consecutive ones behind the greatest so far, as the engine counts."""

    def __init__(self) -> None:
        self._parts: list[npt.NDArray[np.float32]] = []
        self._top = 0.0

    def add(self, count: int, given: npt.NDArray[np.float32] | None) -> None:
        if not count:
            return
        line = np.broadcast_to(self._top + np.arange(count, dtype=np.float32), (3, count)) if given is None else given
        self._parts.append(line)
        self._top = max(self._top, float(line.max()) + 1)

    @property
    def positions(self) -> npt.NDArray[np.float32]:
        return np.concatenate(self._parts, axis=1)


def noisy(frame: npt.NDArray[np.uint8], chance: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return a frame with noise."""
    noise = chance.normal(0, FLICKER, frame.shape[:2])[..., None]
    made: npt.NDArray[np.uint8] = (frame + noise).clip(0, 255).astype(np.uint8)
    return made
