"""Judge of the miniature: what a recognizer that is not ours understands, beside the voice it was trained on.

`python -m train.judge --weights FOLDER` runs the checkpoint in this process; `--url http://HOST:PORT` judges a running
deployment. Both print one JSON line per voice: word error with the recognizer's own language model, and how often it
chooses the right one of near-alike sentences. Without pocketsphinx it says so and exits with status 3.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from .data import HELD_OUT, spoken
from .recognizer import Recognizer, word_errors
from .sentences import held_out, near_alike, plain

Speaker = Callable[[str, int], np.ndarray]
"""Text and seed to samples at 24 kHz."""

SAMPLING: Final = {"temperature": 0.4, "top_p": 0.9, "repetition_penalty": 1.0}
CHOICES: Final = 9
"""Near-alike sentences beside the right one."""
MISSING: Final = 3
"""Exit status without a recognizer."""


def judged(name: str, speak: Speaker, texts: list[str], recognizer: Recognizer) -> dict[str, object]:
    """Return the figures of one speaker."""
    errors = words = right = 0
    sound_s = made_s = 0.0
    for index, text in enumerate(texts):
        start = time.monotonic()
        samples = speak(written(text), index)
        made_s += time.monotonic() - start
        sound_s += len(samples) / 24000
        errors += word_errors(plain(text).split(), recognizer.words(samples))
        words += len(text.split())
        others = near_alike(text, CHOICES, random.Random(f"near {text}"))
        right += recognizer.choice(samples, [text, *others]) == 0
    return {
        "speaker": name, "sentences": len(texts), "words": words, "word_error": round(errors / words, 3),
        "chosen_right": right, "choices": CHOICES + 1, "sound_s": round(sound_s, 1), "made_s": round(made_s, 1),
    }  # fmt: skip


def written(text: str) -> str:
    """Return a plain sentence with its capital and its mark."""
    return f"{text[:1].upper()}{text[1:]}."


def source(voice: str) -> Speaker:
    """Return the voice that the miniature was trained on."""
    return lambda text, seed: spoken(text, voice)


def resynthesized(out: Path, voice: str, *, streams: bool) -> Speaker:
    """Return the source voice through the trained codec, decoded at once or in streaming windows."""
    import torch

    from .codec import load, streamed, whole

    snac, coder = load(out, torch.device("cpu"))

    def speak(text: str, seed: int) -> np.ndarray:
        with torch.inference_mode():
            latent = coder(torch.from_numpy(spoken(text, voice)).float()[None] / 32768)[0]
            made: np.ndarray = (streamed if streams else whole)(snac, latent)[0].numpy()
        return made

    return speak


def deployed(url: str, voice: str) -> Speaker:
    """Return a running deployment."""
    import httpx
    import soundfile

    client = httpx.Client(base_url=url, timeout=300)

    def speak(text: str, seed: int) -> np.ndarray:
        body: dict[str, Any] = {"input": text, "voice": voice, "response_format": "wav", "seed": seed, **SAMPLING}
        answer = client.post("/v1/audio/speech", json={"model": "orpheus", **body})
        answer.raise_for_status()
        samples, _ = soundfile.read(io.BytesIO(answer.content), dtype="int16")
        return np.asarray(samples)

    return speak


def local(folder: Path, voice: str, *, streams: bool) -> Speaker:
    """Return the checkpoint, run in this process by the project's own modules."""
    from .local import LocalSpeaker

    speaker = LocalSpeaker(folder, streams=streams)
    return lambda text, seed: speaker.speak(text, voice, seed, SAMPLING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="exported checkpoint")
    parser.add_argument("--url", help="running deployment")
    parser.add_argument("--codec", type=Path, help="folder of the training, to judge the codec alone")
    parser.add_argument("--voice", nargs="+", default=["tara"], help="official voice names")
    parser.add_argument("--sentences", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=1e9, help="no speaker starts after this time")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the training data, whose held-out sentences are used"
    )
    options = parser.parse_args()
    if importlib.util.find_spec("pocketsphinx") is None:
        print("judge skipped: pocketsphinx is not installed (pip install pocketsphinx)", file=sys.stderr)
        sys.exit(MISSING)
    recognizer, texts = Recognizer(), held_out(HELD_OUT, options.seed)[: options.sentences]
    start = time.monotonic()
    for voice in options.voice:
        for name, make in speakers(options, voice).items():
            if time.monotonic() - start < options.seconds:
                print(json.dumps({"voice": voice, **judged(name, make(), texts, recognizer)}), flush=True)


def speakers(options: argparse.Namespace, voice: str) -> dict[str, Callable[[], Speaker]]:
    """Return the speakers that the options name, the source voice first where espeak-ng is installed."""
    found: dict[str, Callable[[], Speaker]] = {}
    has_source = importlib.util.find_spec("espeakng_loader") is not None
    if has_source:
        found["espeak-ng"] = lambda: source(voice)
    else:
        print("source voice skipped: espeakng-loader is not installed", file=sys.stderr)
    if options.codec is not None and has_source:
        found["codec, whole"] = lambda: resynthesized(options.codec, voice, streams=False)
        found["codec, streaming windows"] = lambda: resynthesized(options.codec, voice, streams=True)
    if options.weights is not None:
        found["checkpoint, whole"] = lambda: local(options.weights, voice, streams=False)
        found["checkpoint, streaming windows"] = lambda: local(options.weights, voice, streams=True)
    if options.url is not None:
        found["deployment"] = lambda: deployed(options.url, voice)
    return found


if __name__ == "__main__":
    main()
