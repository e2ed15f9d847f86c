"""Spoken words that the miniature learns to say: `python -m train.sounds OUT` writes OUT/sounds.npz.

Needs espeak-ng.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import numpy as np

from scripts.training.espeak import Espeak, Pcm

from .voices import SPEAKERS

SPOKEN_RATE: Final = 24_000
FRAME: Final = 1920
"""Samples of a codec frame."""

LEAD: Final = 480
"""Samples of silence before a word."""

FILE: Final = "sounds.npz"
WORDS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
Spoken = dict[tuple[str, str], Pcm]
"""Sounds by speaker and word, whole frames."""


def make() -> Spoken:
    """Speak every word in the voice of every speaker."""
    espeak = Espeak()
    return {
        (name, word): whole_frames(espeak.word(word, voice, SPOKEN_RATE))
        for name, voice in SPEAKERS.items()
        for word in WORDS
    }


def whole_frames(pcm: Pcm) -> Pcm:
    """Add silence: LEAD samples in front, and behind to whole frames and one more, which parts the words."""
    count = -(-(LEAD + len(pcm)) // FRAME) + 1
    return np.pad(pcm, (LEAD, count * FRAME - LEAD - len(pcm)))


def save(sounds: Spoken, path: Path) -> None:
    """Write the sounds to a file."""
    np.savez_compressed(path, **{"/".join(key): pcm for key, pcm in sounds.items()})  # type: ignore[arg-type]


def load(path: Path) -> Spoken:
    """Read the sounds of a file."""
    with np.load(path) as found:
        return {(name.split("/")[0], name.split("/")[1]): found[name] for name in found.files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    made = make()
    save(made, options.out / FILE)
    print(f"{len(made)} sounds", flush=True)


if __name__ == "__main__":
    main()
