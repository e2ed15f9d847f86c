"""The trained miniature: digits that end by themselves and that a recognizer hears right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from mstar_core.layers import load_weights
from mstar_core.plugin.processor import PromptRequest
from mstar_qwen3tts.checkpoint.config import read_config
from mstar_qwen3tts.checkpoint.shipped import FOLDER
from mstar_qwen3tts.checkpoint.weights import NAMES, own_tensors
from mstar_qwen3tts.model import new_module
from mstar_qwen3tts.params import bound_params
from mstar_qwen3tts.processor import Processor

from .driver import RULE, DenseCache

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CONFIG = read_config(FOLDER)
LONGEST = 40
"""Frames that no row of three words reaches."""


@functools.cache
def node(name: str) -> Any:
    module = new_module(name, CONFIG)
    load_weights(module, own_tensors(FOLDER, name), NAMES[name])
    return module.eval().requires_grad_(False)


def frames(text: str, voice: str, *, is_whole: bool = True) -> Tensor:
    """Return the most likely frames of a text: int64 [n, groups]."""
    params = bound_params(CONFIG)(voice=voice, non_streaming_mode=is_whole)
    made = Processor(FOLDER, {}).process_prompt(PromptRequest(text=text, params=params))
    rows, trailing = torch.from_numpy(made.arrays["prompt"]), made.arrays.get("trailing", np.zeros(0, np.int64))
    talker, kv = node("Talker"), DenseCache()
    out, found = talker(kv=kv, positions=torch.arange(len(rows)), prompt=rows), list[Tensor]()
    greedy = {f"subtalker_{name}": torch.zeros(1, dtype=kind) for name, kind in RULE}
    while len(found) < LONGEST:
        logits, step = talker.head(out["hidden"][-1:])[0], len(found)
        allowed = [*range(CONFIG.predictor.vocab), CONFIG.codes.eos]
        code = allowed[int(logits[allowed].argmax())]
        if code == CONFIG.codes.eos:
            break
        out = talker(
            kv=kv,
            positions=torch.tensor([len(rows) + step]),
            code0=torch.tensor([code]),
            text=torch.tensor([int(trailing[step]) if step < len(trailing) else -1]),
            random=torch.zeros(1, CONFIG.groups - 1),
            **{name: out[name][-1:] for name in ("last_hidden", "begun")},
            **greedy,
        )
        found.append(out["frame"][0])
    return torch.stack(found)


def sound(codes: Tensor) -> npt.NDArray[np.float32]:
    codec = node("Codec")
    samples: npt.NDArray[np.float32] = codec.run(codes[None], codec.new_state(1))[0][0].numpy()
    return samples


def test_its_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 2_000_000


@pytest.mark.parametrize("is_whole", [True, False])
def test_speech_ends_and_follows_the_text(is_whole: bool) -> None:
    one, row = (frames(text, "ryan", is_whole=is_whole) for text in ("seven", "seven three one"))
    assert len(one) < len(row) < LONGEST
    assert torch.equal(row[: len(one) - 1, 0], one[:-1, 0])


def test_a_recognizer_hears_its_words() -> None:
    listen = recognizer()
    heard = [listen(sound(frames(word, voice))) == word for voice in CONFIG.voices for word in WORDS]
    assert sum(heard) >= 0.9 * len(heard)


def recognizer() -> Callable[[npt.NDArray[np.float32]], str]:
    pocketsphinx, soxr = pytest.importorskip("pocketsphinx"), pytest.importorskip("soxr")
    decoder = pocketsphinx.Decoder(loglevel="FATAL", lm=None)
    decoder.add_jsgf_string("words", f"#JSGF V1.0; grammar words; public <word> = {' | '.join(WORDS)} ;")
    decoder.activate_search("words")

    def listen(samples: npt.NDArray[np.float32]) -> str:
        quiet = np.zeros(4000, np.float32)
        slow = np.concatenate([quiet, soxr.resample(samples, 24_000, 16_000), quiet])
        noisy = slow + np.random.default_rng(0).normal(0, 1e-3, len(slow))  # it fails on digital zeros
        decoder.start_utt()
        decoder.process_raw((noisy.clip(-1, 1) * 32767).astype("<i2").tobytes(), full_utt=True)
        decoder.end_utt()
        found = decoder.hyp()
        return str(found.hypstr) if found is not None else ""

    return listen
