"""The trained miniature `orpheus:mini`: a recognizer understands what it says, and a broken part is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mstar_core.layers import Rotary
from mstar_orpheus.checkpoint.shipped import FOLDER
from mstar_orpheus.plugin import Params
from mstar_orpheus.vocoder import frames
from tests.runtime.deployment import Deployment

from .test_train import train

SENTENCES = 4
LEAST = 3
"""Least number of sentences that the recognizer chooses out of ten near-alike ones. By chance it is 0.4."""
RATE = 24_000
VOICE = "tara"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Deployment(name="mini", weights_source="mini") as running:
        yield running.url


def test_sentences_have_the_length_of_speech(url: str) -> None:
    speak = train("judge").deployed(url, VOICE)
    short, long = (len(speak(text, 1)) / RATE for text in ("Hello.", "The red fox ran over the green hill today."))
    assert 0.2 < short < 2.0 < long < 6.0


def test_a_recognizer_understands_what_is_said(url: str) -> None:
    judge = train("judge")
    recognizer, speak = train("recognizer").Recognizer(), judge.deployed(url, VOICE)
    texts = train("sentences").held_out(SENTENCES, 1)
    heard = [judge.judged(speak, text, number, recognizer) for number, text in enumerate(texts)]
    assert sum(each.is_right for each in heard) >= LEAST, heard


# -- in one process ----------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch
FEW = 3
LONGEST = 420
"""Ids of five seconds, after which a broken model that does not stop is cut."""


def is_understood(patch: Patch) -> bool:
    """Return whether the recognizer chooses all of a few sentences right but one, spoken in streaming windows."""
    judge, recognizer = train("judge"), train("recognizer").Recognizer()
    patch.setattr(train("local"), "LIMIT", LONGEST)
    speak, wrong = judge.local(FOLDER, VOICE, streams=True), 0
    for number, text in enumerate(train("sentences").held_out(FEW, 1)):
        wrong += not judge.judged(speak, text, number, recognizer).is_right
        if wrong > 1:
            return False
    return True


def test_a_recognizer_understands_the_modules_of_the_plugin(monkeypatch: Patch) -> None:
    assert is_understood(monkeypatch)


def test_the_first_window_sounds_like_that_of_the_reference() -> None:
    """The default differs by less than another seed does; a window of two frames is heard."""
    window = train("first_window")
    found = window.compared(FOLDER, train("sentences").held_out(2, 1), [VOICE])
    early = found[f"{Params().first_window_frames} frames"]
    assert 0 < early.worst_db < found["another seed"].mean_db / 2
    assert found["another seed"].worst_db < 1 < found["2 frames"].mean_db
    assert found["2 frames"].mean_db < found["the next frame"].mean_db


def positions_that_stand_still(patch: Patch) -> None:
    true = Rotary.forward
    patch.setattr(Rotary, "forward", lambda self, positions: true(self, torch.zeros_like(positions)))


def windows_in_the_wrong_order(patch: Patch) -> None:
    speaker = train("local").LocalSpeaker
    true = speaker._sound

    def sound(self: Any, ids: list[int]) -> np.ndarray:
        samples = true(self, ids)
        size = 8 * self._config.frame_samples
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        return np.concatenate(parts[::-1])

    patch.setattr(speaker, "_sound", sound)


def levels_in_the_wrong_order(patch: Patch) -> None:
    local = train("local")
    true = frames.codes_from_ids
    patch.setattr(local, "codes_from_ids", lambda *given: true(*given).flip(-1))


@pytest.mark.parametrize("broken", [positions_that_stand_still, windows_in_the_wrong_order, levels_in_the_wrong_order])
def test_a_broken_part_is_noticed(broken: Callable[[Patch], None], monkeypatch: Patch) -> None:
    broken(monkeypatch)
    assert not is_understood(monkeypatch)
