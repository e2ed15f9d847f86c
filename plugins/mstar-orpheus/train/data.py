"""Training data: made sentences spoken by espeak-ng, in shards that depend on the seed alone.

`python -m train.data OUT --sentences 72000` writes `shard-00000.npz`, …; each appears when it is complete, so that the
codec may start on the first ones. Values: pcm int16 [samples], ends int64 [n] (samples), and texts and voices as UTF-8
lines (uint8).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from scripts.training.espeak import Espeak

from .sentences import held_out, training
from .voices import RATE, VOICES

FRAME: Final = 2048
"""Samples of one frame of 7 ids."""
BEFORE, AFTER = 1, 2
"""Silent frames around the speech: streaming does not send the first frame and the last two."""
SHARD: Final = 512
HELD_OUT: Final = 200
"""Sentences of the judge that training excludes."""

_espeak: Espeak | None = None


def spoken(text: str, voice: str) -> np.ndarray:
    """Return speech between its silent frames, int16 [whole frames]. voice: an official name."""
    global _espeak  # noqa: PLW0603  # one per process, because espeak-ng has global state
    _espeak = _espeak or Espeak()
    samples = _espeak.speak(text, VOICES[voice], RATE)
    frames = -(-len(samples) // FRAME) + BEFORE + AFTER
    whole = np.zeros(frames * FRAME, np.int16)
    whole[BEFORE * FRAME : BEFORE * FRAME + len(samples)] = samples
    return whole


def shard(number: int, folder: Path, seed: int, size: int) -> float:
    """Write one shard and return its seconds of sound."""
    texts = training(seed, number * SHARD, size, frozenset(held_out(HELD_OUT, seed)))
    voices = [random.Random(f"voice {seed} {number * SHARD + index}").choice(list(VOICES)) for index in range(size)]
    sounds = [spoken(text, voice) for text, voice in zip(texts, voices, strict=True)]
    part = folder / f".{number}.npz"
    np.savez(
        part,
        pcm=np.concatenate(sounds),
        ends=np.cumsum([len(sound) for sound in sounds]),
        texts=_lines(texts),
        voices=_lines(voices),
    )
    part.rename(folder / f"shard-{number:05}.npz")
    return sum(len(sound) for sound in sounds) / RATE


def _lines(texts: list[str]) -> np.ndarray:
    return np.frombuffer("\n".join(texts).encode(), np.uint8)


def lines(value: np.ndarray) -> list[str]:
    """Return the texts or voices of a shard."""
    return value.tobytes().decode().split("\n")


def make(folder: Path, sentences: int, seed: int, processes: int) -> float:
    """Write all shards and return the seconds of sound."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [min(SHARD, sentences - start) for start in range(0, sentences, SHARD)]
    work = partial(shard, folder=folder, seed=seed)
    # espeak-ng keeps state between utterances, so a shard gets a fresh process to have the same bytes everywhere.
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        jobs = [pool.apply_async(work, (number,), {"size": size}) for number, size in enumerate(sizes)]
        return sum(job.get() for job in jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sentences", type=int, default=72000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    start = time.monotonic()
    seconds = make(options.folder, options.sentences, options.seed, options.processes)
    print(
        f"{options.sentences} sentences, {seconds / 3600:.2f} h of speech, in {time.monotonic() - start:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
