"""Sentences of a text in pieces."""

from __future__ import annotations

import pytest

from mstar_core.api.text.sentences import Sentences


def split(*pieces: str, limit: int = 400) -> list[list[str]]:
    """Return the sentences after each piece and at the end."""
    sentences = Sentences(limit)
    return [*(sentences.push(piece) for piece in pieces), sentences.end()]


def test_a_sentence_is_complete_when_the_next_one_begins() -> None:
    assert split("Hello ", "there.", " ", "How", " are you") == [[], [], [], ["Hello there."], [], ["How are you"]]


@pytest.mark.parametrize("text", ["Dr. Smith paid 3.50 for it.", "It opens at 5 p.m. on Mondays"])
def test_a_point_within_a_sentence_ends_nothing(text: str) -> None:
    assert split(*text) == [[]] * len(text) + [[text]]


def test_other_writing_systems_have_sentences_too() -> None:
    assert split("今天天气很好。我们去公园吧。好") == [["今天天气很好。", "我们去公园吧。"], ["好"]]


def test_paragraphs_and_marks_alone_are_not_spoken() -> None:
    assert split("A heading\n\n* * *\n\nA line. ...") == [["A heading", "A line."], []]


def test_a_text_without_an_end_is_cut_between_words() -> None:
    text = "alpha beta, gamma delta epsilon zeta eta theta"
    found = [part for parts in split(text, limit=20) for part in parts]
    assert found == ["alpha beta,", "gamma delta epsilon", "zeta eta theta"]
    assert [part for parts in split("x" * 50, limit=20) for part in parts] == ["x" * 20, "x" * 20, "x" * 10]


def test_nothing_is_lost_whatever_the_pieces() -> None:
    text = "One two three. Four! Five six, seven eight nine? Ten"
    for size in range(1, 12):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert " ".join(part for parts in split(*pieces) for part in parts) == text
