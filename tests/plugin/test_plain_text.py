"""Text of ids as they arrive: characters come whole, and a first space can be left out."""

from __future__ import annotations

import pytest

from mstar_core.plugin.plain_text import ByteDetokenizer

EURO = "€".encode()
PIECES = [b" a", EURO[:1], EURO[1:2], EURO[2:], b" b", EURO[:2]]


@pytest.mark.parametrize(("strips", "start"), [(False, " a"), (True, "a")])
def test_characters_come_when_they_are_complete(strips: bool, start: str) -> None:
    detokenizer = ByteDetokenizer(PIECES.__getitem__, strips_space=strips)
    assert [detokenizer.push([token]) for token in range(len(PIECES))] == [start, "", "", "€", " b", ""]
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


def test_ids_that_come_together_give_the_same_text() -> None:
    detokenizer = ByteDetokenizer(PIECES.__getitem__)
    assert detokenizer.push([0, 1, 2, 3, 4]) + detokenizer.flush() == " a€ b"


def test_a_text_that_follows_another_one_keeps_its_first_space() -> None:
    detokenizer = ByteDetokenizer(PIECES.__getitem__, strips_space=True)
    detokenizer.go_on()
    assert detokenizer.push([0, 4]) == " a b"
