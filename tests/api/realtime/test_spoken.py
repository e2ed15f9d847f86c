"""Text of speech that is cut where its sound was played to."""

from __future__ import annotations

import pytest

from mstar_core.api.realtime.sound.spoken import SpokenText

WORDS = "one two three four five six seven eight nine ten"


def spoken(*, is_whole: bool) -> SpokenText:
    """Return speech of 1 s for each word: its text first, then its sound."""
    speech = SpokenText(1000)
    for word in WORDS.split():
        speech.say(word if word == "one" else f" {word}")
        speech.sound(1000)
    speech.is_whole = is_whole
    return speech


@pytest.mark.parametrize("frame", range(0, 10_001, 400))
def test_text_ends_where_sound_ended_at_every_fifth_frame(frame: int) -> None:
    """A frame of the codec has 80 ms."""
    for is_whole in (True, False):
        speech = spoken(is_whole=is_whole)
        speech.cut(frame)
        assert speech.samples == frame and WORDS.startswith(speech.text.rstrip())
        assert len(speech.text) <= len(WORDS) * frame / 10_000
        assert speech.text.split() == WORDS.split()[: len(speech.text.split())], "a word is cut"
        assert len(speech.text.split()) >= frame // 1000 - 2


def test_text_that_came_behind_the_played_sound_is_cut_from_an_interrupted_answer() -> None:
    speech = SpokenText(1000)
    speech.say("one two ")
    speech.sound(2000)
    speech.say("three four five six seven")
    speech.sound(200)
    speech.cut(1990)
    assert speech.text == "one two "
    speech.cut(0)
    assert (speech.text, speech.samples) == ("", 0)


def test_a_cut_behind_the_end_changes_nothing_and_text_without_spaces_is_cut_anywhere() -> None:
    speech = spoken(is_whole=True)
    speech.cut(10_000)
    assert (speech.text, speech.duration_ms) == (WORDS, 10_000)
    other = SpokenText(1000, "一二三四五六七八九十", 1000, is_whole=True)
    other.cut(500)
    assert other.text == "一二三四五"
