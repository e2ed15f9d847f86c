"""Made sounds: spoken digits that the miniature hears, and spoken answers that it learns to say.

`python -m train.sounds OUT` writes OUT/sounds.npz. A process with espeak-ng makes it once; all later stages read it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from mstar_qwen3omni.world import ANSWERS, DIGITS
from scripts.training.espeak import Espeak, Pcm, Voice

from .voices import SPEAKERS

HEARD_RATE: Final = 16_000
SPOKEN_RATE: Final = 24_000
FRAME: Final = 1920
"""Samples of a codec frame."""

LEAD: Final = 480
"""Samples of silence before a spoken answer."""

LONGEST: Final = 15_200
"""Samples of the longest sound that is heard: under a second, so that it is one short chunk of the encoder."""

SHORTEST: Final = 4_000
FILE: Final = "sounds.npz"
ACCENTS: Final = ("en-us", "en-gb")


@dataclass(frozen=True, slots=True)
class Sounds:
    """digits: spoken digits at 16 kHz with their numbers. answers: by speaker and word at 24 kHz, whole frames."""

    digits: tuple[tuple[int, Pcm], ...]
    answers: dict[tuple[str, str], Pcm]


def make(seed: int, digits: int) -> Sounds:
    """Speak `digits` random digits in random voices, and every answer in the voice of every speaker."""
    espeak, chance = Espeak(), np.random.default_rng(seed)
    heard = []
    for _ in range(digits):
        voice = Voice(
            name=ACCENTS[chance.integers(len(ACCENTS))],
            words_per_minute=int(chance.integers(120, 190)),
            pitch=int(chance.integers(10, 91)),
            pitch_range=int(chance.integers(20, 70)),
        )
        number = int(chance.integers(len(DIGITS)))
        heard.append((number, espeak.word(DIGITS[number], voice, HEARD_RATE)[:LONGEST]))
    said = {
        (name, word): whole_frames(espeak.word(word, voice, SPOKEN_RATE))
        for name, voice in SPEAKERS.items()
        for word in ANSWERS
    }
    return Sounds(tuple(heard), said)


def whole_frames(pcm: Pcm) -> Pcm:
    """Add silence: LEAD samples in front, and behind to whole frames and one more, which decoding cuts off in part."""
    count = -(-(LEAD + len(pcm)) // FRAME) + 1
    return np.pad(pcm, (LEAD, count * FRAME - LEAD - len(pcm)))


def placed(pcm: Pcm, chance: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return a heard sound with random volume, silence at both ends and noise: float32 [samples] in [-1, 1]."""
    room = max(0, LONGEST - len(pcm))
    before = int(chance.integers(room // 2 + 1))
    after = int(chance.integers(room - before + 1))
    whole = np.pad(pcm, (before, max(after, SHORTEST - before - len(pcm)))).astype(np.float32) / 32768
    made: npt.NDArray[np.float32] = whole * chance.uniform(0.4, 1.2) + chance.normal(0, 2e-3, len(whole))
    return made.clip(-1, 1).astype(np.float32)


def save(sounds: Sounds, path: Path) -> None:
    """Write the sounds to a file."""
    digits, answers = [pcm for _, pcm in sounds.digits], list(sounds.answers.values())
    np.savez_compressed(
        path,
        numbers=[number for number, _ in sounds.digits],
        digits=np.concatenate(digits),
        digit_ends=np.cumsum([len(each) for each in digits]),
        answers=np.concatenate(answers),
        answer_ends=np.cumsum([len(each) for each in answers]),
        words=["/".join(key) for key in sounds.answers],
    )


def load(path: Path) -> Sounds:
    """Read the sounds of a file."""
    with np.load(path) as found:
        digits = np.split(found["digits"], found["digit_ends"][:-1])
        answers = np.split(found["answers"], found["answer_ends"][:-1])
        keys = [tuple(str(each).split("/")) for each in found["words"]]
        numbers = [int(each) for each in found["numbers"]]
    return Sounds(
        tuple(zip(numbers, digits, strict=True)),
        {(speaker, word): pcm for (speaker, word), pcm in zip(keys, answers, strict=True)},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--digits", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sounds = make(options.seed, options.digits)
    save(sounds, options.out / FILE)
    print(f"{len(sounds.digits)} digits, {len(sounds.answers)} answers", flush=True)


if __name__ == "__main__":
    main()
