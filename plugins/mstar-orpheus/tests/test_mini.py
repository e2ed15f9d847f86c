"""The trained miniature `orpheus:mini`: a recognizer understands what it says, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.deployment import Deployment

from .test_train import train

SENTENCES = 6
LEAST = 5
"""Least number of sentences that the recognizer chooses out of ten near-alike ones. By chance it is 0.6."""
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
    pytest.importorskip("pocketsphinx")
    judge = train("judge")
    recognizer, speak = train("recognizer").Recognizer(), judge.deployed(url, VOICE)
    texts = train("sentences").held_out(SENTENCES, 1)
    heard = [judge.judged(speak, text, number, recognizer) for number, text in enumerate(texts)]
    assert sum(each.is_right for each in heard) >= LEAST, heard
