"""Places and page lists of attention metadata equal those computed token by token."""

from __future__ import annotations

import numpy as np
import pytest

from mstar_core.engine.steps.attention import AttentionMetadata, starts_of

PAGE = 4
TABLES = np.random.default_rng(0).permutation(48).reshape(4, 12).astype(np.int32)
NONE = -1


def place(row: int, at: int) -> int:
    return int(TABLES[row, at // PAGE]) * 2 * PAGE + at % PAGE


def mixed(counts: list[int], lengths: list[int], causal: list[bool], writes: list[bool]) -> AttentionMetadata:
    return AttentionMetadata(
        query_starts=starts_of(np.array(counts, dtype=np.int64)),
        page_rows=np.array([(index * 3 + 1) % 4 for index in range(len(counts))]),
        lengths=np.array(lengths),
        causal=np.array(causal),
        writes=np.array(writes),
        tables=TABLES,
    )


SHAPES = [
    ([1, 1, 1], [0, 3, 40]),
    ([4, 4], [8, 0]),
    ([2, 1, 3], [1, 7, 4]),
    ([9, 1, 16, 5], [3, 0, 8, 17]),
    ([30], [7]),
]


@pytest.mark.parametrize(("counts", "lengths"), SHAPES, ids=str)
@pytest.mark.parametrize("padding", [0, 3])
def test_each_token_has_the_place_behind_those_before_it(counts: list[int], lengths: list[int], padding: int) -> None:
    """One page per sequence, several pages, and decode, with padding behind them."""
    flags = [True] * len(counts)
    metadata = mixed(counts, lengths, flags, flags)
    sequences = list(zip(metadata.page_rows.tolist(), lengths, counts, strict=True))
    expected = [place(row, length + token) for row, length, count in sequences for token in range(count)]
    places = metadata.places(PAGE, sum(counts) + padding, NONE)
    assert places.dtype == np.int64 and places.tolist() == expected + [NONE] * padding


def test_tokens_that_are_not_appended_have_no_place() -> None:
    metadata = mixed([1, 5, 2], [4, 3, 9], [True, False, True], [True, False, True])
    expected = [place(1, 4), *[NONE] * 5, place(3, 9), place(3, 10)]
    assert metadata.places(PAGE, 8, NONE).tolist() == expected
    assert metadata.tokens_of(metadata.writes).tolist() == [0, 6, 7]


def test_a_sequence_that_only_reads_needs_no_pages_for_its_tokens() -> None:
    full = 12 * PAGE
    metadata = mixed([5, 2], [full - 1, 0], [False, True], [False, True])
    assert metadata.places(PAGE, 7, NONE).tolist() == [*[NONE] * 5, place(0, 0), place(0, 1)]
    one = mixed([1, 1], [full, 4], [False, True], [False, True])
    assert one.places(PAGE, 2, NONE).tolist() == [NONE, place(0, 4)]


@pytest.mark.parametrize(("counts", "lengths"), SHAPES, ids=str)
def test_page_lists_cover_the_tokens_of_the_forward(counts: list[int], lengths: list[int]) -> None:
    flags = [True] * len(counts)
    metadata = mixed(counts, lengths, flags, flags)
    starts, pages, last = metadata.page_lists(PAGE)
    for index, (row, length, count) in enumerate(zip(metadata.page_rows, lengths, counts, strict=True)):
        used = -(-(length + count) // PAGE)
        assert pages[starts[index] : starts[index + 1]].tolist() == TABLES[row, :used].tolist()
        assert last[index] == length + count - (used - 1) * PAGE
    assert {array.dtype for array in (starts, pages, last)} == {np.dtype(np.int32)}


def test_sequences_of_equal_counts_are_the_same_however_they_are_given() -> None:
    rows, lengths = np.array([2, 0]), np.array([5, 0])
    equal = AttentionMetadata.of(rows, lengths, TABLES, 3, causal=False)
    listed = AttentionMetadata.of(rows, lengths, TABLES, np.array([3, 3]), causal=False)
    assert equal.query_starts.tolist() == listed.query_starts.tolist() == [0, 3, 6]
    assert equal.tokens == 6 and not equal.is_decode and not equal.causal.any() and equal.writes.all()


def test_the_decode_batch_is_the_leading_sequences_that_append_one_token() -> None:
    flags = [True] * 4
    assert mixed([1, 1, 7, 1], [0] * 4, flags, flags).leading_decodes == 2
    assert mixed([1, 1, 1, 1], [0] * 4, flags, flags).leading_decodes == 4
    assert mixed([1, 1, 1, 1], [0] * 4, flags, [True, False, True, True]).leading_decodes == 1
    assert mixed([1, 1, 1, 1], [0] * 4, [False, *flags[1:]], flags).leading_decodes == 0
    assert AttentionMetadata.empty(TABLES).leading_decodes == 0


def test_selected_sequences_are_packed_anew() -> None:
    metadata = mixed([1, 5, 2, 4], [4, 3, 9, 1], [True, False, True, True], [True, False, True, True])
    chosen = metadata.select(np.array([False, True, False, True]))
    assert chosen.query_starts.tolist() == [0, 5, 9] and chosen.lengths.tolist() == [3, 1]
    assert chosen.page_rows.tolist() == metadata.page_rows[[1, 3]].tolist() and chosen.tables is metadata.tables
    assert chosen.causal.tolist() == [False, True] and chosen.writes.tolist() == [False, True]
    assert metadata.select(slice(2)).query_starts.tolist() == [0, 1, 6]
