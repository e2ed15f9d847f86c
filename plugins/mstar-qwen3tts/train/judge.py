"""Judge of `qwen3_tts:mini` over HTTP: spoken digits, heard by pocketsphinx with a grammar of the ten words.

`python -m train.judge URL` prints one JSON object; exits with 1 below the shares of --least and --least-in-lines. Every
word is also sent as JSON lines, one character each, so that it arrives while it is spoken. With `--sounds FILE`, the
file of `train.sounds`, the figure for the voice itself stands beside.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import numpy.typing as npt

from . import sounds
from .sounds import SPOKEN_RATE, WORDS
from .voices import SPEAKERS

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


def spoken(client: httpx.Client, text: str, voice: str, seed: int, *, in_lines: bool = False) -> Samples:
    """Return the sound of a text: float32 [samples] at 24 kHz. in_lines: the text arrives in single characters."""
    body = {"model": "qwen3_tts", "voice": voice, "response_format": "pcm", "seed": seed}
    if in_lines:
        lines = [body, *({"input": letter} for letter in text)]
        content = "".join(f"{json.dumps(line)}\n" for line in lines)
        made = client.post("/v1/audio/speech", content=content, headers={"Content-Type": "application/x-ndjson"})
    else:
        made = client.post("/v1/audio/speech", json={**body, "input": text})
    made.raise_for_status()
    return np.frombuffer(made.content, "<i2").astype(np.float32) / 32768


def judge(speak: Callable[[str, str, int], Samples], listen: Listener, rounds: int, workers: int = 1) -> float:
    """Return the share of words heard right: every word in every voice, so many times. workers: requests at a time."""
    said = [(word, voice, number) for number in range(rounds) for word in WORDS for voice in SPEAKERS]
    with ThreadPoolExecutor(workers) as pool:
        heard = list(pool.map(lambda each: speak(*each), said))
    return round(sum(listen(sound) == each[0] for each, sound in zip(said, heard, strict=True)) / len(said), 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--sounds", type=Path)
    parser.add_argument("--rounds", type=int, default=2, help="times that each word is said in each voice")
    parser.add_argument("--workers", type=int, default=1, help="requests at a time")
    parser.add_argument("--least", type=float, default=0.9, help="share of words sent whole")
    parser.add_argument("--least-in-lines", type=float, default=0.8, help="share of words that arrive in lines")
    options = parser.parse_args()
    listen = recognizer()
    with httpx.Client(base_url=options.url, timeout=120) as client:
        found = {
            name: judge(partial(spoken, client, in_lines=in_lines), listen, options.rounds, options.workers)
            for name, in_lines in (("words", False), ("words in lines", True))
        }
    if options.sounds is not None:
        of_voice = {key: listen(pcm / np.float32(32768)) == key[1] for key, pcm in sounds.load(options.sounds).items()}
        found["the voice itself"] = round(sum(of_voice.values()) / len(of_voice), 4)
    print(json.dumps(found))
    is_fine = found["words"] >= options.least and found["words in lines"] >= options.least_in_lines
    return int(not is_fine)


if __name__ == "__main__":
    sys.exit(main())
