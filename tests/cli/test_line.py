"""Lines have their exact width with any text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstarctl.output.line import cells, clip, fit, left, line, right, safe, spread, take, wrap

FEW = settings(max_examples=40, deadline=None)
WORDS = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs", "Mn")), max_size=30).map(safe)
PARTS = st.lists(st.tuples(WORDS, st.sampled_from(["", "dim", "bad"])), max_size=6)


@FEW
@given(PARTS, st.integers(0, 60))
def test_a_fitted_line_has_exactly_its_width(parts: list[tuple[str, str]], width: int) -> None:
    assert fit(line(*parts), width).width == width


@FEW
@given(WORDS, st.integers(0, 40))
def test_a_cell_has_exactly_its_width(text: str, width: int) -> None:
    assert cells(clip(text, width)) <= width
    assert cells(left(text, width)) == width
    assert cells(right(text, width)) == width


@FEW
@given(PARTS, PARTS, st.integers(1, 80))
def test_two_ends_fill_a_line(start: list[tuple[str, str]], end: list[tuple[str, str]], width: int) -> None:
    assert spread(line(*start), line(*end), width).width == width


@FEW
@given(st.lists(WORDS, max_size=8), st.integers(1, 60))
def test_parts_are_taken_whole(words: list[str], width: int) -> None:
    row = take([line((word, "")) for word in words], width)
    assert row.width <= width
    assert all(span.text in words or not span.text.strip() for span in row.spans)


@FEW
@given(WORDS, st.integers(4, 40))
def test_wrapped_text_loses_nothing_but_blanks(text: str, width: int) -> None:
    rows = wrap(text, width)
    assert all(cells(row) <= width for row in rows)
    assert "".join("".join(rows).split()) == "".join(text.split())


def test_wide_characters_count_two_cells() -> None:
    assert cells("日本") == 4
    assert clip("日本語テキスト", 6) == "日本…"
    assert left("日本", 5) == "日本 "


@pytest.mark.parametrize("bad", ["\x1b[2Jgone", "a\nb", "\x07", "\u202eabc", "\x9b31m"])
def test_external_text_cannot_control_the_terminal(bad: str) -> None:
    assert safe(bad).isprintable()
