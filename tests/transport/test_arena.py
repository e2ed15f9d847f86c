"""The arena: loans never overlap, counts add up, stale handles are errors, limits have numbers."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mstar_core.errors import ArenaFull, TransportError
from mstar_core.messages.tensors import ShmTensor
from mstar_core.transport import arena_path
from mstar_core.transport.arena import Arena, ArenaReader, FdServer, FreeList

KIB = 1024


@pytest.fixture
def arena():
    with Arena("worker-0", incarnation=1, segment_bytes=64 * KIB, max_bytes=256 * KIB, slots=32) as opened:
        yield opened


@pytest.fixture
def reader(arena, directory):
    server = FdServer(arena_path(directory, "worker-0", 1), arena)
    reader = ArenaReader()
    reader.connect("worker-0", server.path, 1)
    yield reader
    reader.close()
    server.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(1000, dtype=np.int64),
        lambda: np.arange(1000, dtype=np.float32).reshape(10, 100)[::3, ::-2],
        lambda: np.asfortranarray(np.arange(600, dtype=np.int16).reshape(20, 30)),
        lambda: np.arange(1000, dtype=">f8"),
        lambda: np.array(3.5, dtype=np.float16),
        lambda: np.zeros((0, 7), dtype=np.uint8),
        lambda: np.array([True, False]),
    ],
    ids=["flat", "strided", "fortran", "big-endian", "scalar", "empty", "bool"],
)
def test_any_array_comes_out_as_it_went_in(arena, reader, make):
    array = make()
    ref = arena.put(array, "api")
    for out in (reader.open(ref), reader.copy(ref, np.copy)):
        assert out.shape == array.shape
        assert out.dtype == array.dtype.newbyteorder("<")
        np.testing.assert_array_equal(out, array)


def test_reading_is_in_place_and_read_only(arena, reader):
    ref = arena.put(np.zeros(10_000), "api")
    first, second = reader.open(ref), reader.open(ref)
    assert first.__array_interface__["data"][0] == second.__array_interface__["data"][0]
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
    reader.copy(ref, np.copy)[0] = 1
    assert first[0] == 0


def test_an_arena_is_mapped_once_however_many_tensors_and_segments(arena, reader):
    refs = [arena.put(np.full(30 * KIB, number, dtype=np.uint8), "api") for number in range(8)]
    assert arena.committed_bytes == 256 * KIB
    assert [int(reader.open(ref)[-1]) for ref in refs] == list(range(8))
    assert reader.mapped == 1


def test_a_tensor_may_be_larger_than_a_segment(arena, reader):
    array = np.random.default_rng(0).integers(0, 255, 200 * KIB, dtype=np.uint8)
    np.testing.assert_array_equal(reader.open(arena.put(array, "api")), array)


def test_memory_is_taken_only_when_it_is_needed_and_used_again(arena):
    assert arena.committed_bytes == 0
    for _ in range(50):
        ref = arena.put(np.zeros(60 * KIB, dtype=np.uint8), "api")
        assert arena.release(ref.slot, ref.generation)
    assert arena.committed_bytes == 64 * KIB
    assert (arena.live, arena.used_bytes) == (0, 0)


def test_reserve_takes_memory_ahead(arena):
    arena.reserve(100 * KIB)
    assert arena.committed_bytes == 128 * KIB
    arena.reserve(1)
    assert arena.committed_bytes == 128 * KIB
    with pytest.raises(ArenaFull):
        arena.reserve(257 * KIB)


def test_a_full_arena_says_so_with_numbers_and_goes_on(arena):
    ref = arena.put(np.zeros(200 * KIB, dtype=np.uint8), "api")
    with pytest.raises(ArenaFull, match="102400 bytes needed, 57344 in one piece free") as full:
        arena.put(np.zeros(100 * KIB, dtype=np.uint8), "api")
    assert full.value.facts == {"needed": 100 * KIB, "free": 56 * KIB}
    assert arena.live == 1
    arena.put(np.zeros(56 * KIB, dtype=np.uint8), "api")
    arena.release(ref.slot, ref.generation)
    arena.put(np.zeros(100 * KIB, dtype=np.uint8), "api")


def test_no_slot_left_is_a_full_arena(arena):
    for _ in range(32):
        arena.put(np.zeros(1), "api")
    with pytest.raises(ArenaFull, match="all 32 slots are lent"):
        arena.put(np.zeros(1), "api")


def test_a_machine_without_memory_is_a_full_arena(arena, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ArenaFull, match="the system has no memory: No space left"):
        arena.put(np.zeros(10), "api")
    assert (arena.live, arena.committed_bytes) == (0, 0)


def test_a_release_counts_once(arena):
    ref = arena.put(np.zeros(10), "api")
    assert arena.release(ref.slot, ref.generation)
    assert not arena.release(ref.slot, ref.generation)
    again = arena.put(np.zeros(10), "api")
    assert again.slot == ref.slot
    assert not arena.release(ref.slot, ref.generation), "a late release ended another loan"
    assert not arena.release(999, 1)
    assert arena.live == 1


def test_a_dead_peer_gives_back_what_it_had_and_only_that(arena):
    for to in ("api", "worker-1", "api"):
        arena.put(np.zeros(1000), to)
    assert arena.reclaim("api") == 2
    assert arena.reclaim("api") == 0
    assert arena.live == 1


def test_a_stale_handle_is_an_error_never_other_bytes(arena, reader):
    stale = arena.put(np.ones(1000), "api")
    arena.release(stale.slot, stale.generation)
    successor = arena.put(np.zeros(1000), "api")
    assert (successor.slot, successor.offset) == (stale.slot, stale.offset)
    for read in (reader.open, lambda ref: reader.copy(ref, np.copy)):
        with pytest.raises(TransportError, match="loan of a tensor ended"):
            read(stale)


def test_a_loan_that_ends_during_a_copy_is_an_error_and_not_a_mix_of_two_tensors(arena, reader):
    lent = arena.put(np.ones(1000), "api")

    def slowly(array: np.ndarray) -> np.ndarray:
        copied = array.copy()
        arena.release(lent.slot, lent.generation)
        arena.put(np.zeros(1000), "api")
        copied[500:] = array[500:]
        return copied

    with pytest.raises(TransportError, match="loan of a tensor ended"):
        reader.copy(lent, slowly)


def test_a_handle_of_an_earlier_life_is_an_error(arena, reader, directory):
    before = arena.put(np.ones(10), "api")
    with Arena("worker-0", incarnation=2, segment_bytes=64 * KIB, max_bytes=256 * KIB, slots=32) as successor:
        server = FdServer(arena_path(directory, "worker-0", 2), successor)
        reader.connect("worker-0", server.path, 2)
        after = successor.put(np.zeros(10), "api")
        assert (after.slot, after.offset) == (before.slot, before.offset)
        with pytest.raises(TransportError, match="loan of a tensor ended"):
            reader.open(before)
        assert not successor.release(before.slot, before.generation)
        np.testing.assert_array_equal(reader.open(after), np.zeros(10))
        server.close()


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1 << 40},
        {"offset": -64},
        {"offset": 0},
        {"slot": -1},
        {"slot": 1 << 40},
        {"size_bytes": 8},
        {"shape": (-10,)},
        {"shape": (11,)},
        {"dtype": "object"},
        {"owner": "worker-9"},
        {"generation": 7},
    ],
    ids=str,
)
def test_a_mangled_handle_is_an_error(arena, reader, change):
    ref = arena.put(np.zeros(10), "api")
    fields = {name: getattr(ref, name) for name in ref.__struct_fields__} | change
    with pytest.raises(TransportError):
        reader.open(ShmTensor(**fields))


def test_bfloat16_travels_as_its_bits(arena, reader):
    bits = np.arange(64, dtype=np.uint16)
    ref = arena.put(bits, "api", dtype="bfloat16")
    assert ref.dtype == "bfloat16"
    np.testing.assert_array_equal(reader.open(ref), bits)


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([object()]), None),
        (np.array(["text"]), None),
        (np.zeros(3, dtype=[("a", "i4")]), None),
        (np.zeros(3, dtype=np.float32), "bfloat16"),
        (np.zeros(3), "float7"),
    ],
    ids=["object", "text", "record", "wrong-bits", "unknown"],
)
def test_types_that_cannot_be_sent_are_refused_and_cost_nothing(arena, array, dtype):
    with pytest.raises(TransportError):
        arena.put(array, "api", dtype=dtype)
    assert (arena.live, arena.used_bytes) == (0, 0)


def test_the_reader_keeps_what_it_holds_when_the_owner_is_forgotten(directory):
    # A name that no other test of this process uses.
    with Arena("worker-8", incarnation=1, segment_bytes=64 * KIB, max_bytes=256 * KIB, slots=32) as arena:
        with closing(FdServer(arena_path(directory, "worker-8", 1), arena)) as server, closing(ArenaReader()) as reader:
            reader.connect("worker-8", server.path, 1)
            array = reader.open(arena.put(np.arange(1000), "api"))
            reader.forget("worker-8")
            arena.close()
            np.testing.assert_array_equal(array, np.arange(1000))
            assert maps("mstar-worker-8") > 0
            del array
            assert maps("mstar-worker-8") == 0


def test_news_of_an_old_death_does_not_unmap_the_living(arena, reader):
    ref = arena.put(np.arange(10), "api")
    reader.forget("worker-0", incarnation=0)
    np.testing.assert_array_equal(reader.open(ref), np.arange(10))
    reader.forget("worker-0", incarnation=1)
    with pytest.raises(TransportError, match="owner of a tensor is gone"):
        reader.open(ref)


def test_a_closed_arena_refuses_and_its_readers_learn_of_it(arena, reader):
    ref = arena.put(np.arange(10), "api")
    reader.open(ref)
    arena.close()
    arena.close()
    with pytest.raises(TransportError, match="loan of a tensor ended"):
        reader.open(ref)
    with pytest.raises(TransportError, match="closed"):
        arena.put(np.arange(10), "api")
    assert not arena.release(ref.slot, ref.generation)


def test_an_owner_that_does_not_answer_is_an_error_not_a_wait(arena, directory):
    reader = ArenaReader(timeout_s=0.05)
    reader.connect("worker-0", directory / "nothing.fd", 1)
    with pytest.raises(TransportError, match="cannot be mapped"):
        reader.open(arena.put(np.zeros(10), "api"))


def test_closing_frees_every_descriptor_and_mapping(directory):
    def cycle(number: int) -> None:
        with Arena("worker-9", incarnation=number, segment_bytes=64 * KIB, max_bytes=256 * KIB) as arena:
            server = FdServer(arena_path(directory, "worker-9", number), arena)
            reader = ArenaReader()
            reader.connect("worker-9", server.path, number)
            assert reader.open(arena.put(np.arange(100), "api"))[99] == 99
            reader.close()
            server.close()
            server.close()

    cycle(0)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 20):
        cycle(number)
    assert len(os.listdir("/proc/self/fd")) == before
    assert maps("mstar-worker-9") == 0
    assert list(directory.iterdir()) == []


def maps(name: str) -> int:
    """Return the number of this process's mappings of memory called `name`."""
    with open("/proc/self/maps") as lines:
        return sum(name in line for line in lines)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 30)), max_size=80))
def test_free_extents_never_overlap_and_merge_back_to_one(steps):
    free, size = FreeList(), 1000
    free.give(0, size)
    taken: list[tuple[int, int]] = []
    for wanted, turn in steps:
        if turn % 3 and taken:
            free.give(*taken.pop(turn % len(taken)))
            continue
        offset = free.take(wanted)
        gaps = gaps_between(taken, size)
        assert (offset is None) == (max(gaps, default=0) < wanted)
        assert free.largest_bytes == max(
            gaps_between(taken + ([(offset, wanted)] if offset is not None else []), size), default=0
        )
        if offset is not None:
            taken.append((offset, wanted))
        assert sum(free._sizes.values()) == size - sum(length for _, length in taken)
    for extent in taken:
        free.give(*extent)
    assert (free.largest_bytes, free.tail_bytes(size)) == (size, size)


def gaps_between(taken: list[tuple[int, int]], size: int) -> list[int]:
    gaps, at = [], 0
    for offset, length in [*sorted(taken), (size, 0)]:
        assert offset >= at, "two extents overlap"
        if offset > at:
            gaps.append(offset - at)
        at = offset + length
    return gaps


class ArenaAgainstModel(RuleBasedStateMachine):
    """An arena beside a dictionary of what was lent: contents, counts and refusals agree after every step."""

    refs = Bundle("refs")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena("owner", incarnation=5, segment_bytes=8 * KIB, max_bytes=64 * KIB, slots=12)
        # The model reads the memory as a reader would, through a mapping of its own.
        mapping = mmap.mmap(self.arena.reader_fd, self.arena.size_bytes, prot=mmap.PROT_READ)
        self.memory = np.frombuffer(mapping, dtype=np.uint8)
        self.lent: dict[tuple[int, int], tuple[ShmTensor, bytes, str]] = {}

    @rule(target=refs, size=st.integers(0, 20 * KIB), to=st.sampled_from(["api", "worker-1"]), fill=st.integers(0, 255))
    def put(self, size: int, to: str, fill: int) -> ShmTensor | None:
        array = np.full(size, fill, dtype=np.uint8)
        try:
            ref = self.arena.put(array, to)
        except ArenaFull as full:
            assert len(self.lent) == 12 or full.facts["free"] < full.facts["needed"]
            return None
        self.lent[ref.slot, ref.generation] = (ref, array.tobytes(), to)
        return ref

    @rule(ref=refs)
    def release(self, ref: ShmTensor | None) -> None:
        if ref is not None:
            key = (ref.slot, ref.generation)
            assert self.arena.release(*key) == (self.lent.pop(key, None) is not None)

    @rule(ref=consumes(refs), to=st.sampled_from(["api", "worker-1"]))
    def reclaim(self, ref: ShmTensor | None, to: str) -> None:
        gone = [key for key, (_, _, peer) in self.lent.items() if peer == to]
        assert self.arena.reclaim(to) == len(gone)
        for key in gone:
            del self.lent[key]

    @invariant()
    def contents_and_counts_agree(self) -> None:
        refs = [ref for ref, _, _ in self.lent.values()]
        spans = [(ref.offset, max(ref.size_bytes, 1)) for ref in refs]
        gaps_between(spans, self.arena.size_bytes)
        for ref, content, _ in self.lent.values():
            assert self.memory[ref.offset : ref.offset + ref.size_bytes].tobytes() == content
        assert self.arena.live == len(refs)
        assert self.arena.used_bytes == sum(-(-length // 64) * 64 for _, length in spans)
        assert self.arena.committed_bytes <= 64 * KIB
        table = self.memory[: 12 * 8].view(np.uint64)
        assert {int(value) for value in table if value} == {ref.generation for ref in refs}

    def teardown(self) -> None:
        del self.memory
        self.arena.close()


TestArenaAgainstModel = ArenaAgainstModel.TestCase
TestArenaAgainstModel.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
