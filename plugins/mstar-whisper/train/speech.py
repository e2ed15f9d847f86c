"""Speech of `orpheus:mini` for the training: `python -m train.speech URL OUT --clips 1500`.

Asks a running deployment over HTTP. Writes OUT/speech.npz: pcm int16 [samples] at 16 kHz, ends int64 [n] and texts as
lines (uint8).
"""

from __future__ import annotations

import argparse
import io
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import soundfile
import soxr

from mstar_whisper.checkpoint.config import RATE

from .world import sentence

VOICES: Final = ("tara", "leah", "jess", "mia", "zoe", "leo", "dan", "zac")
FILE: Final = "speech.npz"


def spoken(client: httpx.Client, text: str, number: int, temperature: float = 0.4) -> np.ndarray:
    """Return a text spoken by the deployment, int16 [samples] at 16 kHz. number: chooses voice and seed."""
    body: dict[str, Any] = {"model": "orpheus", "input": text, "voice": VOICES[number % len(VOICES)], "seed": number}
    body |= {"response_format": "wav", "temperature": temperature, "top_p": 0.9, "repetition_penalty": 1.0}
    answer = client.post("/v1/audio/speech", json=body)
    answer.raise_for_status()
    samples, rate = soundfile.read(io.BytesIO(answer.content), dtype="int16")
    return np.asarray(soxr.resample(samples, rate, RATE), dtype=np.int16)


def make(url: str, clips: int, seed: int, workers: int) -> dict[str, np.ndarray]:
    """Return the spoken sentences, as they are written to the file."""
    texts = [sentence(random.Random(f"speech {seed} {number}"), held_out=False) for number in range(clips)]
    with httpx.Client(base_url=url, timeout=300) as client, ThreadPoolExecutor(workers) as pool:

        def one(number: int) -> np.ndarray:
            warmth = random.Random(f"warmth {seed} {number}").uniform(0.2, 0.6)
            return spoken(client, texts[number], number, warmth)

        sounds = list(pool.map(one, range(clips)))
    return packed(sounds, texts)


def packed(sounds: list[np.ndarray], texts: list[str]) -> dict[str, np.ndarray]:
    """Return sounds and texts as arrays of a file."""
    lines = np.frombuffer("\n".join(texts).encode(), np.uint8)
    return {"pcm": np.concatenate(sounds), "ends": np.cumsum([len(each) for each in sounds]), "texts": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--clips", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=16, help="requests at a time")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    np.savez(options.out / FILE, **make(options.url, options.clips, options.seed, options.workers))


if __name__ == "__main__":
    main()
