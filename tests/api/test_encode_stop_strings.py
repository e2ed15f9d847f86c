"""Stop strings in text that arrives in any pieces: the same result as for the whole text."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mstar_core.api.output.encode import StopStrings

LETTERS = "ab"


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@given(
    st.text(LETTERS, max_size=20),
    st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 99), max_size=20),
)
def test_no_part_of_a_stop_string_is_ever_sent_and_nothing_else_is_lost(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopStrings(stops)
    sent = "".join(matcher.push(piece) for piece in split(text, cuts))
    sent += matcher.flush()
    whole = StopStrings(stops)
    assert sent == whole.push(text) + whole.flush()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert matcher.is_matched == bool(ends)
    if not ends:
        assert sent == text
        return
    assert text.startswith(sent) and not any(stop in sent for stop in stops)
    assert any(text[len(sent) :].startswith(stop) for stop in stops)


@given(st.text(LETTERS, max_size=20), st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=4))
def test_letter_by_letter_the_first_stop_string_to_be_complete_ends_the_text(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    for count, letter in enumerate(text, 1):
        matcher.push(letter)
        assert matcher.is_matched == any(stop in text[:count] for stop in stops)
