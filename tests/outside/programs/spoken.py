"""A spoken question for `qwen3_omni:mini`, and a recognizer that hears its spoken answers."""

import os
import wave

import numpy as np
import soxr
from pocketsphinx import Decoder

RATE, HEARD_RATE = 24_000, 16_000
ANSWER = "seven"
WORDS = os.environ["ANSWERS"].split(",")
NOISE = 1e-3


def question(before_s=0.5, after_s=1.2):
    """Return the spoken digit between silences, as PCM16 at 24 kHz."""
    with wave.open(os.environ["QUESTION"]) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
        samples = soxr.resample(samples, file.getframerate(), RATE)
    whole = np.concatenate([np.zeros(int(before_s * RATE)), samples, np.zeros(int(after_s * RATE))])
    return (whole.clip(-1, 1) * 32767).astype("<i2").tobytes()


def pieces(pcm, milliseconds=50):
    """Return sound in pieces."""
    size = RATE * milliseconds // 1000 * 2
    return [pcm[start : start + size] for start in range(0, len(pcm), size)]


def heard(pcm):
    """Return the answer of the miniature that PCM16 at 24 kHz sounds like."""
    decoder = Decoder(loglevel="FATAL", lm=None)
    decoder.add_jsgf_string("answers", f"#JSGF V1.0; grammar answers; public <answer> = {' | '.join(WORDS)} ;")
    decoder.activate_search("answers")
    quiet = np.zeros(HEARD_RATE // 4, np.float32)
    slow = soxr.resample(np.frombuffer(pcm, "<i2").astype(np.float32) / 32768, RATE, HEARD_RATE)
    whole = np.concatenate([quiet, slow, quiet])
    noisy = whole + np.random.default_rng(0).normal(0, NOISE, len(whole))  # it fails on digital zeros
    decoder.start_utt()
    decoder.process_raw((noisy.clip(-1, 1) * 32767).astype("<i2").tobytes(), full_utt=True)
    decoder.end_utt()
    found = decoder.hyp()
    return found.hypstr if found is not None else None
