"""Judge of `qwen3_omni:mini` over HTTP: new questions, exact answers in text, and recognized answers in speech.

`python -m train.judge URL OUT` reads OUT/sounds.npz, made with another seed than the training's (`--fresh` makes it).
Two judges listen: the nearest spoken answer by spectral distance, and pocketsphinx with a closed grammar where it is
installed. Prints one JSON object; exits with 1 below the shares of --least.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import sys
import wave
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import numpy.typing as npt

from mstar_qwen3omni.world import ANSWERS, RATE, SIDE, Frame, Question, draw

from . import sounds

UNSEEN: Final = 900_001
BANDS: Final = 40
HOP: Final = 240
WINDOW: Final = 600
HEARING_RATE: Final = 16_000
NOISE: Final = 1e-3
"""Standard deviation of added noise, because pocketsphinx fails on digital zeros."""

PIXELS: Final = {"video_min_pixels": SIDE * SIDE}
"""A clip keeps its size. By default a video frame is enlarged, which the miniature has not learned."""

Samples = npt.NDArray[np.float32]
Listener = Callable[[Samples], str | None]
"""From sound at 24 kHz to the answer that it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer. sound: None if the request was for text alone."""

    text: str
    sound: Samples | None = None


Ask = Callable[[Question, bytes, "str | None"], Reply]
"""Called with a question, its file and the voice of a spoken answer."""


# -- files -------------------------------------------------------------------------------------------------------------


def file_of(question: Question, digits: dict[int, list[sounds.Pcm]], chance: np.random.Generator) -> bytes:
    """Return the medium of a question as a PNG, MP4 or WAV file."""
    if question.kind == "audio":
        spoken = digits[question.digit]
        return wav(sounds.placed(spoken[chance.integers(len(spoken))], chance), sounds.HEARD_RATE)
    frames = question.frames()
    return png(frames[0]) if question.kind == "image" else mp4(frames)


def png(frame: Frame) -> bytes:
    """Return a picture as a file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return file.getvalue()


def mp4(frames: Sequence[Frame]) -> bytes:
    """Return a clip as a file of MPEG-4 video."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = SIDE, SIDE, "yuv420p", 4_000_000
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode(None))
    return file.getvalue()


def wav(samples: Samples, rate: int) -> bytes:
    """Return a sound as a file of 16-bit samples."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((samples * 32767).round().astype("<i2").tobytes())
    return file.getvalue()


# -- listeners ---------------------------------------------------------------------------------------------------------


def log_spectrum(samples: Samples) -> npt.NDArray[np.float64]:
    """Return the log-magnitude spectrum in bands: [frames, BANDS]."""
    count = max(1, (len(samples) - WINDOW) // HOP + 1)
    padded = np.pad(samples.astype(np.float64), (0, max(0, WINDOW - len(samples))))
    pieces = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:count] * np.hanning(WINDOW)
    lines = abs(np.fft.rfft(pieces, axis=1))
    edges = np.geomspace(3, lines.shape[1] - 1, BANDS + 1)
    bands = [lines[:, int(low) : max(int(low) + 1, int(high))].mean(1) for low, high in itertools.pairwise(edges)]
    spectrum: npt.NDArray[np.float64] = np.log(np.stack(bands, axis=1) + 1e-2)
    return spectrum


def aligned_distance(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """Return the mean distance of two spectra along their best alignment in time (dynamic time warping)."""
    cost = abs(one[:, None] - other[None]).mean(2)
    total = np.full((len(one) + 1, len(other) + 1), np.inf)
    total[0, 0] = 0.0
    for row in range(len(one)):
        for column in range(len(other)):
            before = min(total[row, column], total[row, column + 1], total[row + 1, column])
            total[row + 1, column + 1] = cost[row, column] + before
    return float(total[-1, -1] / (len(one) + len(other)))


def nearest(answers: dict[tuple[str, str], sounds.Pcm], voice: str) -> Listener:
    """Return the listener that names the nearest answer of a voice by spectrum. It hears silence as None."""
    known = {
        word: log_spectrum(trimmed(pcm / np.float32(32768))) for (name, word), pcm in answers.items() if name == voice
    }

    def listen(samples: Samples) -> str | None:
        own = trimmed(samples)
        if not len(own):
            return None
        spectrum = log_spectrum(own)
        return min(known, key=lambda word: aligned_distance(spectrum, known[word]))

    return listen


def trimmed(samples: npt.NDArray[Any]) -> Samples:
    """Cut silence at both ends."""
    loud = np.flatnonzero(abs(samples) > 0.02)
    found: Samples = samples[loud[0] : loud[-1] + 1].astype(np.float32) if len(loud) else samples[:0]
    return found


def recognizer() -> Listener:
    """Return pocketsphinx with a grammar of all answers. Raises ImportError without the wheel."""
    import soxr
    from pocketsphinx import Decoder

    decoder = Decoder(loglevel="FATAL", lm=None)
    decoder.add_jsgf_string("answers", f"#JSGF V1.0; grammar answers; public <answer> = {' | '.join(ANSWERS)} ;")
    decoder.activate_search("answers")

    def listen(samples: Samples) -> str | None:
        quiet = np.zeros(HEARING_RATE // 4, np.float32)
        slow = np.concatenate([quiet, soxr.resample(samples, sounds.SPOKEN_RATE, HEARING_RATE), quiet])
        noisy = slow + np.random.default_rng(0).normal(0, NOISE, len(slow))
        decoder.start_utt()
        decoder.process_raw((noisy.clip(-1, 1) * 32767).astype("<i2").tobytes(), full_utt=True)
        decoder.end_utt()
        found = decoder.hyp()
        return str(found.hypstr) if found is not None else None

    return listen


# -- judging -----------------------------------------------------------------------------------------------------------


def served(client: httpx.Client, model: str) -> Ask:
    """Return how to ask a deployment, by the chat route."""
    parts = {
        "image": lambda data: {"type": "image_url", "image_url": {"url": _url("image/png", data)}},
        "video": lambda data: {"type": "video_url", "video_url": {"url": _url("video/mp4", data)}},
        "audio": lambda data: {"type": "input_audio", "input_audio": {"data": _base64(data), "format": "wav"}},
    }

    def ask(question: Question, data: bytes, voice: str | None) -> Reply:
        content = [parts[question.kind](data), {"type": "text", "text": question.text}]
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 8,
            "seed": 1,
            **PIXELS,
        }
        if voice is not None:
            body |= {
                "modalities": ["text", "audio"],
                "audio": {"voice": voice, "format": "wav"},
                "talker_max_tokens": 40,
            }
        made = client.post("/v1/chat/completions", json=body)
        made.raise_for_status()
        message = made.json()["choices"][0]["message"]
        if voice is None:
            return Reply(text=message["content"])
        audio = message["audio"]
        return Reply(
            text=message.get("content") or audio.get("transcript") or "",
            sound=_samples(base64.b64decode(audio["data"])),
        )

    return ask


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{_base64(data)}"


def _samples(data: bytes) -> Samples:
    with wave.open(io.BytesIO(data)) as file:
        found: Samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    return found


def judge_text(ask: Ask, made: sounds.Sounds, count: int, seed: int = UNSEEN, workers: int = 4) -> dict[str, float]:
    """Return the share of exact answers to new questions, in all and by kind."""
    asked = questions(made, count, seed)
    with ThreadPoolExecutor(workers) as pool:
        replies = list(pool.map(lambda pair: ask(*pair, None).text.strip() == pair[0].answer, asked))
    found: dict[str, list[bool]] = {"text": replies}
    for (question, _), is_right in zip(asked, replies, strict=True):
        found.setdefault(question.kind, []).append(is_right)
    return {name: round(sum(each) / len(each), 4) for name, each in found.items()}


def judge_speech(
    ask: Ask,
    made: sounds.Sounds,
    count: int,
    listeners: dict[str, Callable[[str], Listener]],
    seed: int = UNSEEN + 1,
    workers: int = 4,
) -> dict[str, float]:
    """Return, by listener, the share of spoken answers heard as the true answer, and as the answer in text.

    listeners: called with the voice. workers: requests at a time.
    """
    voices = sorted({speaker for speaker, _ in made.answers})
    asked = questions(made, count, seed)
    heard: dict[str, list[bool]] = {}
    hearing = {(name, voice): new(voice) for name, new in listeners.items() for voice in voices}
    spoken = [voices[index % len(voices)] for index in range(len(asked))]
    with ThreadPoolExecutor(workers) as pool:
        replies = list(pool.map(lambda pair, voice: ask(*pair, voice), asked, spoken))
    for (question, _), voice, reply in zip(asked, spoken, replies, strict=True):
        assert reply.sound is not None
        for name in listeners:
            word = hearing[name, voice](reply.sound)
            heard.setdefault(name, []).append(word == question.answer)
            heard.setdefault(f"{name}_as_text", []).append(word == reply.text.strip())
    return {name: round(sum(each) / len(each), 4) for name, each in heard.items()}


def questions(made: sounds.Sounds, count: int, seed: int) -> list[tuple[Question, bytes]]:
    """Return questions with their files. Clips are left out where PyAV is not installed."""
    chance = np.random.default_rng(seed)
    digits: dict[int, list[sounds.Pcm]] = {}
    for number, pcm in made.digits:
        digits.setdefault(number, []).append(pcm)
    has_clips = find_spec("av") is not None
    asked = (question for question in (draw(chance) for _ in range(count)) if has_clips or question.kind != "video")
    return [(question, file_of(question, digits, chance)) for question in asked]


def listeners_of(made: sounds.Sounds) -> dict[str, Callable[[str], Listener]]:
    """Return the listeners that are installed."""
    found: dict[str, Callable[[str], Listener]] = {"nearest": lambda voice: nearest(made.answers, voice)}
    try:
        heard = recognizer()
    except ImportError:
        return found
    return found | {"pocketsphinx": lambda voice: heard}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("out", type=Path, help="folder for sounds.npz of the judge")
    parser.add_argument("--fresh", type=int, default=0, help="make this many new spoken digits first, with espeak-ng")
    parser.add_argument("--model", default="qwen3_omni")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--spoken", type=int, default=60)
    parser.add_argument("--workers", type=int, default=4, help="requests at a time")
    parser.add_argument("--least", type=float, default=0.95)
    options = parser.parse_args()
    path = options.out / sounds.FILE
    if options.fresh:
        options.out.mkdir(parents=True, exist_ok=True)
        sounds.save(sounds.make(UNSEEN, options.fresh), path)
    made = sounds.load(path)
    listeners = listeners_of(made)
    with httpx.Client(base_url=options.url, timeout=120) as client:
        ask = served(client, options.model)
        found = judge_text(ask, made, options.questions, workers=options.workers)
        found |= judge_speech(ask, made, options.spoken, listeners, workers=options.workers)
    for name, new in listeners.items():  # what the voice itself gets
        voice = {pair: new(pair[0])(pcm / np.float32(32768)) == pair[1] for pair, pcm in made.answers.items()}
        found[f"{name}_of_the_voice"] = round(sum(voice.values()) / len(voice), 4)
    print(json.dumps(found))
    return int(min(found["text"], found["nearest"]) < options.least)


if __name__ == "__main__":
    sys.exit(main())
