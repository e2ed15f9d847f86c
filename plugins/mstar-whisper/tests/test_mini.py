"""The trained miniature `whisper:mini`: what it writes for held-out sentences, and that a broken part is noticed."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar_core.errors import RequestError
from mstar_whisper.checkpoint.config import RATE, read_config
from mstar_whisper.checkpoint.shipped import FOLDER
from mstar_whisper.nodes.decoder import Decoder
from mstar_whisper.nodes.encoder import Encoder
from mstar_whisper.sample_inputs import SENTENCE

from .reference import Served, ids_of, melody
from .training import train

FEW = 12
"""Sentences of the recording that a test hears."""

MOST = 0.1
"""Most words in error, as a share."""

SLACK_S = 0.35
"""Most distance of a time from the border between two sentences: the speaker pauses around each."""


@pytest.fixture(scope="module")
def served() -> Served:
    return Served(FOLDER)


@pytest.fixture(scope="module")
def said() -> list[Any]:
    found: list[Any] = train("recording").load()[:FEW]
    return found


def word_error(served: Served, said: list[Any]) -> float:
    """Return the share of words in error, of sentences transcribed together."""
    plain, errors = train("world").plain, train("judge").word_errors
    answers = served.ask(*(one.samples for one in said), language="en")
    found = [plain(served.processor._tokens.text(ids_of(answer))) for answer in answers]
    wanted = [plain(one.text) for one in said]
    return float(sum(map(errors, wanted, found)) / sum(map(len, wanted)))


def test_its_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 1_700_000


def test_it_writes_what_is_said(served: Served, said: list[Any]) -> None:
    assert word_error(served, said) <= MOST


def test_it_hears_that_the_language_is_english(served: Served, said: list[Any]) -> None:
    assert served.segments(said[0].samples)["language"] == "english"


def test_sentences_of_a_long_recording_lie_where_they_are_said(served: Served, said: list[Any]) -> None:
    plain, errors = train("world").plain, train("judge").word_errors
    found = served.segments(np.concatenate([one.samples for one in said]), language="en")["segments"]
    wanted = [word for one in said for word in plain(one.text)]
    heard = [word for each in found for word in plain(each["text"])]
    assert errors(wanted, heard) <= 2 * MOST * len(wanted)
    borders = np.cumsum([len(one.samples) for one in said]) / RATE
    near = [float(np.abs(borders - each["end"]).min()) for each in found]
    assert np.mean(np.array(near) < SLACK_S) >= 0.8, near


def test_silence_between_sentences_is_left_out_by_voice_activity(served: Served, said: list[Any]) -> None:
    """Five seconds of silence lie before, between and behind two sentences."""
    plain, quiet, (one, two) = train("world").plain, np.zeros(5 * RATE, np.float32), said[2:4]
    sound = np.concatenate([quiet, one.samples, quiet, two.samples, quiet])
    found = served.segments(sound, language="en", vad=True)["segments"]
    assert [plain(each["text"]) for each in found] == [plain(one.text), plain(two.text)]
    second = 10 + len(one.samples) / RATE
    assert [each["start"] for each in found] == [pytest.approx(5, abs=SLACK_S), pytest.approx(second, abs=SLACK_S)]
    assert served.segments(np.concatenate([quiet, quiet]), vad=True)["segments"] == []


def test_voice_activity_without_its_package_names_the_extra(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstar_core.plugin.media.speech.importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match="speech cannot be detected") as refused:
        served.ask(np.zeros(RATE, np.float32), vad=True)
    assert "mstarctl[realtime]" in refused.value.hint and refused.value.field == "vad"


def test_words_follow_each_other_through_the_sentence(served: Served, said: list[Any]) -> None:
    one = max(said, key=lambda each: len(each.text))
    words = served.segments(one.samples, language="en", timestamps=True, words=True)["words"]
    starts = [word["start"] for word in words]
    assert starts == sorted(starts) and starts[-1] - starts[0] > 0.4 * len(one.samples) / RATE


def test_the_sample_is_one_of_its_sentences(served: Served) -> None:
    plain = train("world").plain
    assert plain(served.text_of(SENTENCE.read_bytes())) == plain(SENTENCE.with_suffix(".txt").read_text("utf-8"))


def test_the_commands_of_the_training_make_a_checkpoint(tmp_path: Path) -> None:
    world, speech, trainer = train("world"), train("speech"), train("train")
    texts = [world.sentence(random.Random(number), held_out=False) for number in range(4)]
    sounds = [(32768 * melody(1.0 + number / 4, number)).astype(np.int16) for number in range(4)]
    for name in (train("source").FILE, speech.FILE):
        np.savez(tmp_path / name, **speech.packed(sounds, texts))
    plain = {"out": tmp_path, "seconds": 0.0, "steps": 2, "batch": 2, "rate": 1e-3, "report": 1, "seed": 1}
    for stage in trainer.STAGES:
        trainer.train(argparse.Namespace(stage=stage, **plain))
    train("export").export(tmp_path / "made", tmp_path)
    assert read_config(tmp_path / "made") == read_config(FOLDER)
    Served(tmp_path / "made").ids(sounds[0].astype(np.float32) / 32768, language="en", max_output_tokens=4)


def test_the_world_has_a_token_for_each_word_and_holds_sentences_out(served: Served) -> None:
    world = train("world")
    for is_held_out in (False, True):
        text = world.sentence(random.Random(1), held_out=is_held_out)
        assert len(served.processor._tokens.encode(f" {text}")) == len(text.split()) + 1
    heard = {world.sentence(random.Random(number), held_out=False) for number in range(300)}
    assert not heard & {world.sentence(random.Random(number), held_out=True) for number in range(300)}


# -- broken parts ------------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def encoder_without_places(patch: Patch) -> None:
    true = Encoder.encoded

    def encoded(self: Encoder, windows: Any) -> Any:
        self.embed_positions.weight.data.zero_()
        return true(self, windows)

    patch.setattr(Encoder, "encoded", encoded)


def decoder_that_hears_nothing(patch: Patch) -> None:
    true = Decoder.remember
    patch.setattr(Decoder, "remember", lambda self, states, kv: true(self, 0 * states, kv))


@pytest.mark.parametrize("broken", [encoder_without_places, decoder_that_hears_nothing])
def test_a_broken_part_is_noticed(broken: Any, said: list[Any], monkeypatch: Patch) -> None:
    broken(monkeypatch)
    assert word_error(Served(FOLDER), said[:4]) > 3 * MOST
