"""Windows that the miniature learns from: log-mel frames of clips after each other, and the ids to write for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from mstar_core.families.mel import LogMel
from mstar_whisper.checkpoint.config import STRIDE, WhisperConfig
from mstar_whisper.text.tokens import Tokens

from .world import plain, words

SCALE: Final = 4.0
"""Decades of power in one unit of a spectrum."""

SILENCE: Final = -1.5
"""Level of digital zeros."""

DEPTH: Final = 2.0
"""Levels below the loudest one that a spectrum keeps."""

HEARD: Final = 1.1
"""Speech begins and ends with frames that are at most so far below the loudest one."""

WORDS: Final = sorted({word for text in words() for word in plain(text)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A spoken sentence. mel: float16 [frames, bins]. begin, end: frames between which it is heard."""

    mel: np.ndarray
    text: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One window. mel: float32 [frames, bins]. ids: of prompt and text. start: index of the start id, whose successor
    tells the language, or silence. first: of the text's first id. words: of WORDS, in order; empty if the last is cut.
    """

    mel: np.ndarray
    ids: tuple[int, ...]
    start: int
    first: int
    is_silent: bool
    words: tuple[int, ...]


def load_clips(path: Path, bins: int) -> list[Clip]:
    """Read the clips of a file of `train.speech` or `train.source`."""
    with np.load(path) as found:
        pcm, ends, texts = found["pcm"], found["ends"], found["texts"].tobytes().decode().split("\n")
    spectra, clips = LogMel(bins), []
    for text, start, end in zip(texts, [0, *ends[:-1]], ends, strict=True):
        mel = spectra([torch.from_numpy(pcm[start:end].astype(np.float32) / 32768)])[0].numpy()
        loud = np.flatnonzero(mel.max(axis=1) > mel.max() - HEARD)
        clips.append(Clip(mel=mel.astype(np.float16), text=text, begin=int(loud[0]), end=int(loud[-1]) + 1))
    return clips


class Lessons:
    """Draws windows at random."""

    def __init__(self, folder: Path, config: WhisperConfig, seed: int) -> None:
        self._config, self._ids, self._tokens = config, config.ids, Tokens(folder, config.ids)
        self._chance = np.random.default_rng(seed)
        self._word = {word: index for index, word in enumerate(WORDS)}

    def draw(self, clips: Sequence[Clip], count: int, *, is_whole: bool) -> list[Lesson]:
        """Return windows. is_whole: of the full length, which may hold several sentences, else of one sentence."""
        return [self._window(clips) if is_whole else self._single(clips) for _ in range(count)]

    def _single(self, clips: Sequence[Clip]) -> Lesson:
        return self._lesson([self._pick(clips)], is_whole=False)

    def _window(self, clips: Sequence[Clip]) -> Lesson:
        kind = self._chance.random()
        count = 0 if kind < 0.03 else 1 if kind < 0.55 else 4
        return self._lesson([self._pick(clips) for _ in range(count)], is_whole=True)

    def _pick(self, clips: Sequence[Clip]) -> Clip:
        """Return a clip at a random speed."""
        clip = clips[self._chance.integers(len(clips))]
        speed = self._chance.uniform(0.93, 1.07)
        count = round(len(clip.mel) / speed)
        place = np.minimum(np.arange(count) * speed, len(clip.mel) - 1)
        low, part = place.astype(int), (place % 1)[:, None].astype(np.float32)
        mel = clip.mel.astype(np.float32)
        mixed = mel[low] * (1 - part) + mel[np.minimum(low + 1, len(mel) - 1)] * part
        return Clip(mel=mixed, text=clip.text, begin=round(clip.begin / speed), end=round(clip.end / speed))

    def _lesson(self, clips: Sequence[Clip], *, is_whole: bool) -> Lesson:
        """Lay clips after each other with pauses. The last one may be cut by the window's end."""
        chance, bins, frames = self._chance, self._config.bins, self._config.frames
        parts, spoken, at, cut = list[np.ndarray](), list[tuple[Clip, int, int]](), 0, None
        for clip in clips:
            pause = int(chance.integers(0, 60 if chance.random() < 0.3 else 25))
            begin, end = at + pause + clip.begin, at + pause + clip.end
            if begin >= frames - STRIDE:
                break
            parts += [np.full((pause, bins), SILENCE, np.float32), clip.mel]
            at += pause + len(clip.mel)
            if end > frames:
                cut = begin
                break
            spoken.append((clip, begin, end))
        length = frames if is_whole else min(frames, at + int(chance.integers(2, 30)))
        rest = np.full((max(0, length - at), bins), SILENCE, np.float32)
        mel = self._levelled(np.concatenate([*parts, rest])[: length // STRIDE * STRIDE])
        return self._written(mel, spoken, cut)

    def _levelled(self, mel: np.ndarray) -> np.ndarray:
        """Add noise to two of five windows, then raise values more than DEPTH below the largest to that level.

        The spectrogram of the processor has the same floor.
        """
        chance = self._chance
        if chance.random() < 0.4:
            level = mel.max() - chance.uniform(1.0, 2.0) if len(mel) else SILENCE
            noise = 10 ** (SCALE * level) * chance.exponential(size=mel.shape)
            mel = (np.log10(10 ** (SCALE * mel) + noise) / SCALE).astype(np.float32)
        return np.maximum(mel, mel.max() - DEPTH)

    def _written(self, mel: np.ndarray, spoken: Sequence[tuple[Clip, int, int]], cut: int | None) -> Lesson:
        chance, ids = self._chance, self._ids
        is_timed = bool(chance.random() < 0.5) or cut is not None
        text = list[int]()
        for clip, begin, end in spoken:
            own = self._tokens.encode(f" {clip.text}")
            text += [self._time(begin), *own, self._time(end)] if is_timed else own
        if cut is not None:
            text.append(self._time(cut))
        before = self._tokens.encode(f" {chance.choice([clip.text for clip, *_ in spoken])}") if spoken else []
        before = [ids.previous, *before] if before and chance.random() < 0.1 else []
        task = ids.translate if chance.random() < 0.1 else ids.transcribe
        head = [*before, ids.start, ids.languages["en"], task, *([] if is_timed else [ids.no_times])]
        heard = [self._word[word] for clip, *_ in spoken for word in plain(clip.text)]
        return Lesson(
            mel=mel,
            ids=(*head, *text, ids.end)[: self._config.positions + 1],
            start=len(before),
            first=len(head),
            is_silent=not spoken,
            words=tuple(heard) if cut is None else (),
        )

    def _time(self, frame: int) -> int:
        return self._ids.first_time + min(frame // STRIDE, self._config.states)
