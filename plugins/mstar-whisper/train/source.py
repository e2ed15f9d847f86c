"""Speech of espeak-ng for the first half of the training: `python -m train.source OUT --clips 6000`.

Writes OUT/source.npz, in the form of `train.speech`. Speed and pitch vary around the two voices of `orpheus:mini`.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Final

import numpy as np

from mstar_whisper.checkpoint.config import RATE
from scripts.training.espeak import Espeak, Voice

from .speech import packed
from .world import sentence

FILE: Final = "source.npz"
PITCHES: Final = (42, 62)


def make(clips: int, seed: int) -> dict[str, np.ndarray]:
    """Return the spoken sentences, as they are written to the file."""
    espeak, sounds, texts = Espeak(), list[np.ndarray](), list[str]()
    for number in range(clips):
        chance = random.Random(f"source {seed} {number}")
        pitch = chance.choice(PITCHES) + chance.randint(-6, 6)
        voice = Voice(words_per_minute=chance.randint(140, 170), pitch=pitch, pitch_range=chance.randint(32, 48))
        texts.append(sentence(chance, held_out=False))
        sounds.append(espeak.speak(texts[-1], voice, RATE))
    return packed(sounds, texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--clips", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    np.savez(options.out / FILE, **make(options.clips, options.seed))


if __name__ == "__main__":
    main()
