"""Judge of `qwen3_tts:mini` over HTTP: spoken digits, heard by pocketsphinx with a grammar of the ten words.

`python -m train.judge URL` prints one JSON object; exits with 1 below the share of --least. With `--sounds FILE`, the
file of `train.sounds`, the figure for the voice itself stands beside.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import numpy.typing as npt

from . import sounds
from .espeak import SPEAKERS
from .sounds import SPOKEN_RATE, WORDS

HEARING_RATE: Final = 16_000
NOISE: Final = 1e-3
"""Standard deviation of added noise, because pocketsphinx fails on digital zeros."""

Samples = npt.NDArray[np.float32]
Listener = Callable[[Samples], str]
"""Called with the sound of one word; returns the word."""


def recognizer() -> Listener:
    """Return pocketsphinx with a grammar of the ten words. Raises ImportError without the wheel."""
    import soxr
    from pocketsphinx import Decoder

    decoder = Decoder(loglevel="FATAL", lm=None)
    decoder.add_jsgf_string("words", f"#JSGF V1.0; grammar words; public <word> = {' | '.join(WORDS)} ;")
    decoder.activate_search("words")

    def listen(samples: Samples) -> str:
        quiet = np.zeros(HEARING_RATE // 4, np.float32)
        slow = np.concatenate([quiet, soxr.resample(samples, SPOKEN_RATE, HEARING_RATE), quiet])
        noisy = slow + np.random.default_rng(0).normal(0, NOISE, len(slow))
        decoder.start_utt()
        decoder.process_raw((noisy.clip(-1, 1) * 32767).astype("<i2").tobytes(), full_utt=True)
        decoder.end_utt()
        found = decoder.hyp()
        return str(found.hypstr) if found is not None else ""

    return listen


def spoken(client: httpx.Client, text: str, voice: str, seed: int) -> Samples:
    """Return the sound of a text: float32 [samples] at 24 kHz."""
    body = {"model": "qwen3_tts", "input": text, "voice": voice, "response_format": "wav", "seed": seed}
    made = client.post("/v1/audio/speech", json=body)
    made.raise_for_status()
    with wave.open(io.BytesIO(made.content)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def judge(speak: Callable[[str, str, int], Samples], listen: Listener, rounds: int) -> float:
    """Return the share of words heard right: every word in every voice, so many times."""
    said = [(word, voice, number) for number in range(rounds) for word in WORDS for voice in SPEAKERS]
    return round(sum(listen(speak(*each)) == each[0] for each in said) / len(said), 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--sounds", type=Path)
    parser.add_argument("--rounds", type=int, default=2, help="times that each word is said in each voice")
    parser.add_argument("--least", type=float, default=0.9)
    options = parser.parse_args()
    listen = recognizer()
    with httpx.Client(base_url=options.url, timeout=120) as client:
        found = {"words": judge(lambda word, voice, seed: spoken(client, word, voice, seed), listen, options.rounds)}
    if options.sounds is not None:
        of_voice = {key: listen(pcm / np.float32(32768)) == key[1] for key, pcm in sounds.load(options.sounds).items()}
        found["the voice itself"] = round(sum(of_voice.values()) / len(of_voice), 4)
    print(json.dumps(found))
    return int(found["words"] < options.least)


if __name__ == "__main__":
    sys.exit(main())
