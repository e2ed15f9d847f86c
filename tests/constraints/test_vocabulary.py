"""Vocabularies as bytes."""

from __future__ import annotations

import pytest

from mstar_core.constraints.vocabulary import TokenTable

BYTES = [bytes([value]) for value in range(256)]


def table(*words: bytes) -> TokenTable:
    return TokenTable([*BYTES, *words, b"<|end|>"], ends=[256 + len(words)])


def test_text_is_written_in_the_longest_tokens() -> None:
    assert table(b"ab", b"abc").ids_of("xabcab") == [ord("x"), 257, 256]


def test_a_table_is_cut_and_filled_to_the_columns_of_a_head() -> None:
    words = table(b"ab")
    assert len(words.sized(300)) == words.sized(300).tokenizer.vocab_size == 300
    assert words.sized(258) is words


def test_an_end_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        TokenTable(BYTES, ends=[256])
