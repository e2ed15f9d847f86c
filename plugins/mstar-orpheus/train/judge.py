"""Judge of the miniature: what a recognizer that is not ours understands, beside the voice it was trained on.

`python -m train.judge --weights FOLDER` runs the checkpoint in this process; `--url http://HOST:PORT` judges a running
deployment. Both print one JSON line per voice: word error with the recognizer's own language model, and how often it
chooses the right one of near-alike sentences. It exits with status 1 if a speaker is chosen less often than `--least`,
and without pocketsphinx with status 3.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from .data import HELD_OUT, spoken
from .recognizer import Recognizer, word_errors
from .sentences import held_out, near_alike, plain
from .voices import RATE

Speaker = Callable[[str, int], np.ndarray]
"""Text and seed to samples at 24 kHz."""

SAMPLING: Final = {"temperature": 0.4, "top_p": 0.9, "repetition_penalty": 1.0}
CHOICES: Final = 9
"""Near-alike sentences beside the right one."""
MISSING: Final = 3
"""Exit status without a recognizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Result of one sentence. sound_s, made_s: length of the sound, time to make it."""

    errors: int
    words: int
    is_right: bool
    sound_s: float
    made_s: float


def judged(speak: Speaker, text: str, seed: int, recognizer: Recognizer) -> Heard:
    """Return what is understood of one sentence."""
    start = time.monotonic()
    samples = speak(written(text), seed)
    made_s = time.monotonic() - start
    others = near_alike(text, CHOICES, random.Random(f"near {text}"))
    return Heard(
        errors=word_errors(plain(text).split(), recognizer.words(samples)),
        words=len(text.split()),
        is_right=recognizer.choice(samples, [text, *others]) == 0,
        sound_s=len(samples) / RATE,
        made_s=made_s,
    )


def summary(voice: str, speaker: str, heard: Sequence[Heard]) -> dict[str, object]:
    """Return the figures of one speaker."""
    return {
        "voice": voice,
        "speaker": speaker,
        "sentences": len(heard),
        "words": sum(each.words for each in heard),
        "word_error": round(sum(each.errors for each in heard) / sum(each.words for each in heard), 3),
        "chosen_right": sum(each.is_right for each in heard),
        "choices": CHOICES + 1,
        "sound_s": round(sum(each.sound_s for each in heard), 1),
        "made_s": round(sum(each.made_s for each in heard), 1),
    }


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

    def speak(text: str, seed: int) -> np.ndarray:
        body: dict[str, Any] = {"input": text, "voice": voice, "response_format": "wav", "seed": seed, **SAMPLING}
        answer = httpx.post(f"{url}/v1/audio/speech", json={"model": "orpheus", **body}, timeout=300)
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
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the training data, whose held-out sentences are used"
    )
    parser.add_argument("--least", type=float, default=0.8, help="least share chosen right, for exit status 0")
    options = parser.parse_args()
    if importlib.util.find_spec("pocketsphinx") is None:
        print("judge skipped: pocketsphinx is not installed (pip install pocketsphinx)", file=sys.stderr)
        sys.exit(MISSING)
    if importlib.util.find_spec("espeakng_loader") is None:
        print("source voice skipped: espeakng-loader is not installed", file=sys.stderr)
    count, lowest = min(options.sentences, HELD_OUT), 1.0
    with multiprocessing.get_context("spawn").Pool(options.processes, _Judge.start, (options,)) as pool:
        for voice in options.voice:
            for name in speakers(options, voice):
                jobs = [(voice, name, index) for index in range(count)]
                heard = pool.starmap(_Judge.hear, jobs, chunksize=1)
                print(json.dumps(summary(voice, name, heard)), flush=True)
                lowest = min(lowest, sum(each.is_right for each in heard) / count)
    sys.exit(int(lowest < options.least))


class _Judge:
    """Recognizer and speakers of one process."""

    _own: _Judge

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._recognizer = options, Recognizer()
        self._texts = held_out(HELD_OUT, options.seed)
        self._speakers: dict[tuple[str, str], Speaker] = {}

    @classmethod
    def start(cls, options: argparse.Namespace) -> None:
        """Make the judge of this process."""
        cls._own = cls(options)

    @classmethod
    def hear(cls, voice: str, name: str, index: int) -> Heard:
        """Judge one sentence of one speaker."""
        own = cls._own
        if (voice, name) not in own._speakers:
            own._speakers[voice, name] = speakers(own._options, voice)[name]()
        return judged(own._speakers[voice, name], own._texts[index], index, own._recognizer)


def speakers(options: argparse.Namespace, voice: str) -> dict[str, Callable[[], Speaker]]:
    """Return the speakers that the options name, the source voice first where espeak-ng is installed."""
    found: dict[str, Callable[[], Speaker]] = {}
    has_source = importlib.util.find_spec("espeakng_loader") is not None
    if has_source:
        found["espeak-ng"] = lambda: source(voice)
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
