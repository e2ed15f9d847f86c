"""The recording that the judge and the tests use: held-out sentences of `orpheus:mini`, one after the other.

`python -m train.recording URL --sentences 16` makes it anew: held_out.ogg, and held_out.json with each sentence and the
seconds of its sound.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import soundfile

from mstar_whisper.checkpoint.config import RATE

from .speech import spoken
from .world import sentence

FILE: Final = Path(__file__).parent / "held_out.ogg"
SEED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A spoken sentence. samples: float32 [n] at 16 kHz."""

    text: str
    samples: np.ndarray


def say(url: str, count: int, seed: int) -> list[Said]:
    """Let a deployment of `orpheus:mini` say held-out sentences."""
    found = list[Said]()
    with httpx.Client(base_url=url, timeout=300) as client:
        for number in range(count):
            text = sentence(random.Random(f"held out {seed} {number}"), held_out=True)
            found.append(Said(text=text, samples=spoken(client, text, number).astype(np.float32) / 32768))
    return found


def load(path: Path = FILE) -> list[Said]:
    """Read the recording, cut into its sentences."""
    samples, _ = soundfile.read(path, dtype="float32")
    told = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    ends = [round(one["end"] * RATE) for one in told]
    parts = zip(told, [0, *ends[:-1]], ends, strict=True)
    return [Said(text=one["text"], samples=samples[start:end]) for one, start, end in parts]


def save(said: list[Said], path: Path) -> None:
    """Write the recording."""
    ends = np.cumsum([len(one.samples) for one in said]) / RATE
    told = [{"text": one.text, "end": round(float(end), 4)} for one, end in zip(said, ends, strict=True)]
    whole = np.concatenate([one.samples for one in said])
    soundfile.write(path, whole, RATE, format="OGG", subtype="OPUS")
    path.with_suffix(".json").write_text(json.dumps(told, indent=0) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="deployment of orpheus:mini")
    parser.add_argument("--sentences", type=int, default=16)
    options = parser.parse_args()
    save(say(options.url, options.sentences, SEED), FILE)


if __name__ == "__main__":
    main()
