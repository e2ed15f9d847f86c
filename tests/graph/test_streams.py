"""Chunk policies against plain slicing of a list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.errors import GraphError
from mstar_core.graph import Chunk, ChunkCursor, ChunkPolicy, FixedChunk, LeftContext, SlidingWindow

sizes = st.integers(1, 9)
tails = st.sampled_from(["drop", "flush"])
policies: st.SearchStrategy[ChunkPolicy] = st.one_of(
    st.builds(FixedChunk, size=sizes, tail=tails),
    st.builds(SlidingWindow, window=sizes, stride=sizes, tail=tails),
    st.builds(SlidingWindow, window=st.just(9), stride=sizes, tail=tails, first=sizes),
    st.builds(LeftContext, chunk=sizes, left=st.integers(0, 9), tail=tails),
    st.builds(LeftContext, chunk=st.just(9), left=st.integers(0, 9), tail=tails, first=sizes),
)
batches = st.lists(st.integers(0, 12), max_size=12)


def sliced(policy: ChunkPolicy, total: int, flush: bool) -> list[tuple[list[int], bool]]:
    """Return the chunks of `total` items: (items, whether it is the flush)."""
    items = list(range(total))
    chunks: list[tuple[list[int], bool]] = []
    match policy:
        case FixedChunk(size=size):
            whole = total // size * size
            chunks = [(items[at : at + size], False) for at in range(0, whole, size)]
            rest = items[whole:]
        case LeftContext(chunk=chunk, left=left, first=first):
            stops = range(chunk if first is None else first, total + 1, chunk)
            starts = [0, *stops]
            chunks = [(items[max(0, at - left) : stop], False) for at, stop in zip(starts, stops, strict=False)]
            whole = starts[-1]
            rest = items[max(0, whole - left) :] if whole < total else []
        case SlidingWindow(window=window, stride=stride, first=first):
            begin = window if first is None else first
            stops = [begin] if total >= begin else []
            chunks = [(items[:begin], False)] * len(stops)
            if chunks:
                starts = range(stride, total - window + 1, stride)
                chunks += [(items[at : at + window], False) for at in starts]
                stops += [at + window for at in starts]
            handed = max(stops, default=0)
            following = len(stops) * stride
            rest = items[following:] if total > handed else []
            if flush:
                strides = total // stride
                kept = strides - min(strides, max(1, window // stride))
                rest = items[kept * stride : strides * stride][:window]
    if rest and (flush or policy.tail == "flush"):
        chunks.append((rest, True))
    return chunks


@given(policies, batches, st.booleans(), st.booleans())
def test_chunks_are_slices_whatever_the_pace(
    policy: ChunkPolicy, pushes: list[int], flush: bool, announce_first: bool
) -> None:
    cursor, got, total = ChunkCursor(policy, flush), [], sum(pushes)
    if announce_first:
        cursor.end(total)
    for number, count in enumerate(pushes):
        cursor.push(count)
        while number % 2 and (chunk := cursor.pop()):
            assert chunk.start >= 0 and chunk.stop <= sum(pushes[: number + 1])
            got.append(chunk)
    if not announce_first:
        cursor.end(total)
    while chunk := cursor.pop():
        got.append(chunk)
    assert cursor.finished and not cursor.ready
    assert [(list(range(c.start, c.stop)), c.last) for c in got] == sliced(policy, total, flush)
    assert [c.first for c in got] == [True, *[False] * (len(got) - 1)][: len(got)]


@given(policies, batches, st.booleans())
def test_no_chunk_needs_what_was_given_up(policy: ChunkPolicy, pushes: list[int], flush: bool) -> None:
    cursor, given_up = ChunkCursor(policy, flush), 0
    for count in [*pushes, None]:
        if count is None:
            cursor.end(sum(pushes))
        else:
            cursor.push(count)
        while True:
            assert cursor.oldest_needed >= given_up
            given_up = cursor.oldest_needed
            chunk = cursor.pop()
            if chunk is None:
                break
            assert chunk.start >= given_up
    assert cursor.oldest_needed == sum(pushes)


def test_a_sliding_window_is_ready_at_28_items_and_then_each_7() -> None:
    cursor, ready = ChunkCursor(SlidingWindow(28, 7)), []
    for count in range(1, 50):
        cursor.push()
        if cursor.pop() is not None:
            ready.append(count)
    assert ready == [28, 35, 42, 49]


@pytest.mark.parametrize(
    ("total", "expected"), [(0, []), (6, []), (7, [(0, 7)]), (27, [(0, 21)]), (30, [(0, 28), (0, 28)])]
)
def test_a_forced_flush_hands_over_the_last_whole_strides_once(total: int, expected: list[tuple[int, int]]) -> None:
    cursor = ChunkCursor(SlidingWindow(28, 7), flush=True)
    cursor.push(total)
    cursor.end(total)
    chunks = []
    while chunk := cursor.pop():
        chunks.append(chunk)
    assert [(chunk.start, chunk.stop) for chunk in chunks] == expected
    assert [chunk.last for chunk in chunks] == [False] * (len(expected) - 1) + [True] * bool(expected)


def test_the_first_chunk_of_left_context_has_no_context() -> None:
    cursor = ChunkCursor(LeftContext(25, left=25))
    cursor.push(60)
    cursor.end(60)
    chunks = [cursor.pop(), cursor.pop(), cursor.pop()]
    assert [chunk and (chunk.start, chunk.stop, chunk.last) for chunk in chunks] == [
        (0, 25, False),
        (0, 50, False),
        (25, 60, True),
    ]


def test_a_stream_that_ends_empty_finishes_with_no_chunk() -> None:
    cursor = ChunkCursor(FixedChunk(4))
    assert not cursor.finished
    cursor.end(0)
    assert cursor.finished and cursor.pop() is None


def test_an_end_may_be_announced_before_the_last_items_come() -> None:
    cursor = ChunkCursor(FixedChunk(4))
    cursor.end(3)
    assert cursor.pop() is None and not cursor.finished
    cursor.push(3)
    assert cursor.pop() is not None and cursor.finished


def chunks_of(policy: ChunkPolicy, total: int, flush: bool = False) -> list[Chunk]:
    cursor = ChunkCursor(policy, flush)
    cursor.push(total)
    cursor.end(total)
    return [chunk for chunk in iter(cursor.pop, None) if chunk is not None]


@pytest.mark.parametrize("frames", [2, 3, 4])
@pytest.mark.parametrize("total", [0, 13, 14, 21, 28, 35, 70])
@pytest.mark.parametrize("flush", [False, True])
def test_an_early_first_window_changes_no_other_chunk(frames: int, total: int, flush: bool) -> None:
    plain, early = SlidingWindow(28, 7), SlidingWindow(28, 7, first=7 * frames)
    usual, actual = ([c[:2] for c in chunks_of(policy, total, flush) if not c.last] for policy in (plain, early))
    assert actual[:1] == ([(0, 7 * frames)] if total >= 7 * frames else [])
    assert actual[1:] == usual[1:]
    last, plain_last = ([c[:2] for c in chunks_of(policy, total, flush) if c.last] for policy in (early, plain))
    assert last == plain_last


def test_an_early_first_window_is_due_at_its_own_size() -> None:
    cursor = ChunkCursor(SlidingWindow(28, 7, first=14))
    assert cursor.due == 14
    cursor.push(14)
    chunk = cursor.pop()
    assert chunk is not None and chunk.first
    assert cursor.due == 35 and not cursor.ready


def test_the_first_window_of_a_request_is_counted_in_strides() -> None:
    policy = SlidingWindow(28, 7, first_from="frames")
    assert policy.for_request({"frames": 2}) == SlidingWindow(28, 7, first=14, first_from="frames")
    assert policy.for_request({"frames": 4}).first == 28
    assert policy.for_request({}) == policy


def test_more_items_than_announced_are_an_error() -> None:
    cursor = ChunkCursor(FixedChunk(4))
    cursor.end(1)
    with pytest.raises(GraphError, match="2 items, 1 announced"):
        cursor.push(2)


def test_sizes_come_from_the_request_where_the_policy_says_so() -> None:
    policy = LeftContext(25, left=25, chunk_from="frames")
    assert policy.for_request({"frames": 10}) == LeftContext(10, left=25, chunk_from="frames")
    assert policy.for_request({}) == policy


def test_an_early_first_chunk_of_left_context_moves_the_later_ones() -> None:
    cursor = ChunkCursor(LeftContext(chunk=25, left=25, first=8))
    cursor.push(7)
    assert cursor.pop() is None and cursor.due == 8
    cursor.push(26)
    chunks = [cursor.pop(), cursor.pop()]
    assert chunks == [Chunk(0, 8, True, False), Chunk(0, 33, False, False)] and cursor.due == 58
    cursor.end(33)
    assert cursor.finished


def test_the_first_chunk_of_a_request_is_at_most_a_whole_one() -> None:
    policy = LeftContext(25, 25, chunk_from="chunk", first=8, first_from="first")
    assert policy.for_request({}) == LeftContext(25, 25, chunk_from="chunk", first=8, first_from="first")
    assert policy.for_request({"first": 4, "chunk": 10}).first == 4
    assert policy.for_request({"first": 40, "chunk": 10}).first == 10


def test_chunks_grow_up_to_the_largest() -> None:
    cursor = ChunkCursor(LeftContext(8, 0, first=1, grows=True))
    cursor.push(20)
    cursor.end(20)
    chunks = iter(cursor.pop, None)
    assert [(chunk.start, chunk.stop) for chunk in chunks] == [(0, 1), (1, 3), (3, 7), (7, 15), (15, 20)]
    assert cursor.finished


def test_items_are_handed_over_early_where_the_policy_allows_it() -> None:
    cursor = ChunkCursor(LeftContext(8, 0, first=1, grows=True, early=True))
    assert cursor.pop(is_early=True) is None
    taken = []
    for count in (1, 1, 5, 0, 7, 3):
        cursor.push(count)
        while (chunk := cursor.pop()) is not None or (chunk := cursor.pop(is_early=True)) is not None:
            taken.append((chunk.start, chunk.stop, chunk.first, chunk.last))
    # A chunk that came early counts for the growth as any other.
    assert taken == [
        (0, 1, True, False),
        (1, 2, False, False),
        (2, 4, False, False),
        (4, 7, False, False),
        (7, 13, False, False),
        (13, 14, False, False),
        (14, 16, False, False),
        (16, 17, False, False),
    ]
    cursor.end(17)
    assert cursor.finished
    whole = ChunkCursor(LeftContext(8, 0))
    whole.push(5)
    assert whole.pop(is_early=True) is None
