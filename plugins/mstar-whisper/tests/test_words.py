"""Times of words: the path through the costs, and the words that ids form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from mstar_whisper.nodes.alignment import alignment
from mstar_whisper.text.words import times, warped, words

PIECES = {1: b" Hel", 2: b"lo", 3: b" there", 4: b".", 5: "é".encode()[:1], 6: "é".encode()[1:]}


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (7, 3), (12, 40)])
def test_the_path_is_that_of_the_reference(shape: tuple[int, int]) -> None:
    costs = np.random.default_rng(sum(shape)).standard_normal(shape)
    for mine, theirs in zip(warped(costs), _dynamic_time_warping(costs), strict=True):
        assert mine.tolist() == theirs.tolist()


def test_nothing_written_has_no_times() -> None:
    assert times(np.zeros((0, 5), dtype=np.float32)) == []


def test_a_single_id_has_an_alignment_of_finite_numbers() -> None:
    found = alignment(torch.rand(2, 1, 9), 7)
    assert found.shape == (1, 9) and found.isfinite().all()


def test_pieces_between_spaces_are_words() -> None:
    found = words([1, 2, 3, 4], [0.0, 0.2, 0.5, 0.9, 1.0], lambda number: PIECES.get(number, b""))
    assert [(word.text, word.start_s, word.end_s) for word in found] == [("Hello", 0.0, 0.5), ("there.", 0.5, 1.0)]


def test_languages_without_spaces_have_a_word_for_each_character() -> None:
    found = words([5, 6, 5, 6], [0.0, 0.1, 0.2, 0.3, 0.4], lambda number: PIECES.get(number, b""), "ja")
    assert [(word.text, word.start_s) for word in found] == [("é", 0.0), ("é", 0.2)]
