"""Messages between the api and a pool process, and what remains allocated."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pickle import PicklingError
from typing import Any, NoReturn

import numpy as np
import pytest

from mstar_core.api.preprocess.pipe import KEPT_BYTES, MessageMemory, PoolPipe
from mstar_core.plugin.processor import PromptRequest
from tests.api.test_pool import pool_of

MIB = 1 << 20
SIZES = (0, 1000, MIB - 100, MIB + 1, KEPT_BYTES + 5, 20 * MIB)


@pytest.fixture
def ends() -> Iterator[tuple[PoolPipe, PoolPipe]]:
    ours, theirs = PoolPipe.pair()
    yield ours, theirs
    theirs.close(is_shared=True)
    ours.close()


def taken_bytes(end: PoolPipe) -> int:
    """Return the bytes allocated for messages of this end."""
    memory: Any = end._to_peer
    return os.fstat(memory._fd).st_blocks * 512


@pytest.mark.parametrize("size", SIZES)
def test_messages_of_every_size_arrive_both_ways(ends: tuple[PoolPipe, PoolPipe], size: int) -> None:
    ours, theirs = ends
    for number in range(3):
        value: dict[str, Any] = {"data": os.urandom(size), "array": np.arange(size // 8), "number": number}
        ours.send(value)
        note = theirs.note()
        got = theirs.load(note)
        assert note >= size and got["data"] == value["data"] and np.array_equal(got["array"], value["array"])
        theirs.send(got)
        back = ours.receive()
        assert back["data"] == value["data"] and back["number"] == number
        got["array"][:1] = 7  # it belongs to the reader
    assert not theirs.poll()


def test_a_value_stays_as_it_was_when_the_next_message_comes(ends: tuple[PoolPipe, PoolPipe]) -> None:
    ours, theirs = ends
    ours.send(np.zeros(MIB, np.uint8))
    first = theirs.receive()
    ours.send(np.ones(MIB, np.uint8))
    theirs.receive()
    assert not first.any()


def test_memory_of_a_large_message_is_given_back(ends: tuple[PoolPipe, PoolPipe]) -> None:
    ours, theirs = ends
    assert taken_bytes(ours) == 0
    for _ in range(2):
        ours.send(bytes(30 * MIB))
        assert taken_bytes(ours) >= 30 * MIB
        assert len(theirs.receive()) == 30 * MIB
        assert taken_bytes(ours) <= KEPT_BYTES


def test_a_message_that_is_too_large_is_an_error_and_the_next_one_arrives(
    ends: tuple[PoolPipe, PoolPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    monkeypatch.setattr("mstar_core.api.preprocess.pipe.MEMORY_BYTES", 8 * MIB)
    with pytest.raises(MemoryError):
        ours.send([bytes(5 * MIB), bytearray(5 * MIB)])
    assert not theirs.poll(0) and taken_bytes(ours) <= KEPT_BYTES
    ours.send(b"next")
    assert theirs.receive() == b"next"


def test_a_system_without_memory_fails_one_message(
    ends: tuple[PoolPipe, PoolPipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "no space")

    ours, theirs = ends
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(os, "posix_fallocate", full)
        ours.send(bytes(MIB))
    ours.send(b"small")
    assert theirs.receive() == b"small"


def test_what_cannot_be_pickled_is_told_and_the_next_message_goes(ends: tuple[PoolPipe, PoolPipe]) -> None:
    ours, theirs = ends
    with pytest.raises((AttributeError, TypeError, PicklingError)):
        ours.send((bytes(9 * MIB), lambda: None))
    assert not theirs.poll(0) and taken_bytes(ours) <= KEPT_BYTES
    ours.send("next")
    assert theirs.receive() == "next"


def test_no_descriptor_is_left_over() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        ours, theirs = PoolPipe.pair()
        theirs.close(is_shared=True)
        ours.close()
        ours.close()
    MessageMemory().close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("size", [1000, 100_000, 3 * MIB, 70 * MIB])
async def test_a_process_gets_and_gives_messages_of_every_size(size: int) -> None:
    sound = np.random.default_rng(size).uniform(-1, 1, size // 4).astype(np.float32)
    async with pool_of() as pool:
        for _ in range(2):
            data, _ = await pool.postprocess(sound, "audio")
            assert data == (sound * 32767).astype("<i2").tobytes()


@pytest.mark.parametrize("size", [8, 200_000, 3 * MIB])
async def test_a_job_that_cannot_be_sent_fails_alone(size: int) -> None:
    async with pool_of() as pool:
        with pytest.raises((AttributeError, TypeError, PicklingError)):
            await pool._run("postprocess", bytes(size), lambda: None)
        assert pool.busy == 0
        assert (await pool.prompt(PromptRequest(text="abc"))).prompt_tokens == 3
