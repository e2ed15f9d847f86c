"""Windows of one recording side by side: which batches they share, and that they write what they write one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from mstar_core.errors import RequestError
from mstar_core.plugin.params import parse_params
from mstar_core.plugin.processor import Inputs, PromptRequest
from mstar_whisper.checkpoint.config import HOP, RATE
from mstar_whisper.checkpoint.shipped import FOLDER
from mstar_whisper.nodes.decoder import SpeechDecoder
from mstar_whisper.nodes.encoder import Encoder
from mstar_whisper.plugin import Params

from .reference import InParts, Served, wav
from .training import train

COUNT = 4
PAUSE_S = 4
"""Between sentences: more than fits into a window of the miniature beside two of them."""


@pytest.fixture(scope="module")
def served() -> Served:
    return Served(FOLDER)


@pytest.fixture(scope="module")
def parted() -> Served:
    return Served(FOLDER, processor=InParts)


@pytest.fixture(scope="module")
def recording() -> np.ndarray:
    """Return sentences with pauses between them."""
    quiet = np.zeros(PAUSE_S * RATE, np.float32)
    said: list[Any] = train("recording").load()[:COUNT]
    return np.concatenate([part for one in said for part in (quiet, one.samples)])


def inputs_of(served: Served, sound: np.ndarray, **params: Any) -> Inputs:
    given = parse_params(Params, params).params
    return served.processor.process_prompt(PromptRequest(text=None, media=[wav(sound)], params=given))


def test_windows_of_a_recording_share_steps_and_write_what_they_write_alone(
    served: Served, parted: Served, recording: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = served.segments(recording, language="en", vad=True)["segments"]
    passes: Counter[tuple[str, int]] = Counter()
    encode, forward = Encoder.forward, SpeechDecoder.forward

    def encoded(self: Encoder, **inputs: Any) -> Any:
        passes["windows", len(inputs["place"])] += 1
        return encode(self, **inputs)

    def decoded(self: SpeechDecoder, **inputs: Any) -> Any:
        if inputs.get("marks") is not None:
            passes["steps", len(inputs["marks"])] += 1
        return forward(self, **inputs)

    monkeypatch.setattr(Encoder, "forward", encoded)
    monkeypatch.setattr(SpeechDecoder, "forward", decoded)
    together = parted.joined(parted.parts(recording, COUNT, language="en"))
    assert passes["windows", COUNT] == 1 and passes["steps", COUNT] > 1
    for one, other in zip(alone, together, strict=True):
        assert one["tokens"] == other["tokens"] and one["text"] == other["text"]
        assert (one["start"], one["end"]) == (other["start"], other["end"])
        assert one["avg_logprob"] == pytest.approx(other["avg_logprob"], abs=0.02)


def test_parts_are_the_windows_around_speech_with_a_margin(served: Served, recording: np.ndarray) -> None:
    whole = inputs_of(served, recording, vad=True)
    inputs = inputs_of(served, recording, batch_size=COUNT)
    assert inputs.facts == whole.facts and not whole.parts, "a route that joins no answers decodes window after window"
    assert len(inputs.parts) == len(whole.facts["windows"]) == COUNT
    for number, (first, count) in enumerate(whole.facts["windows"]):
        part = inputs.part(number)
        ((margin, frames),) = part.facts["windows"]
        assert part.facts["offset"] + margin == first and frames == count
        sound = part.arrays["pcm"]
        assert np.array_equal(sound, recording[part.facts["offset"] * HOP :][: len(sound)])
        assert len(sound) >= (margin + count) * HOP
        assert bool(part.usage) == (number == 0), "the seconds of the recording count once"


def test_windows_that_read_earlier_text_are_not_decoded_side_by_side(served: Served, recording: np.ndarray) -> None:
    with pytest.raises(RequestError, match="side by side") as refused:
        inputs_of(served, recording, batch_size=2, condition_on_previous=True)
    assert refused.value.field == "batch_size"
    assert not inputs_of(served, recording[: PAUSE_S * RATE], batch_size=2).parts, "silence has no window"
