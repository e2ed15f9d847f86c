"""Output queue of a request: order, one end, bounded memory."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_core.api.output.queue import MOST_EARLY, OutputQueue
from mstar_core.api.output.spool import Spool
from mstar_core.api.output.units import OutputItem
from mstar_core.errors import EngineError, MstarError, WorkerLost
from mstar_core.messages.requests import RequestFinished


def end(emitted: dict[str, int]) -> RequestFinished:
    return RequestFinished(handle=1, reason="stop", emitted=emitted)


def item(value: int, size: int = 4) -> OutputItem:
    return OutputItem(modality="audio", port="pcm", array=np.full(size, value, dtype=np.int32))


async def drain(output_queue: OutputQueue) -> list[int]:
    got: list[int] = []
    while taken := await output_queue.take(0):
        got += [int(one.array[0]) for one in taken]
    return got


async def close(output_queue: OutputQueue) -> None:
    """Close a queue and wait for its thread, which would otherwise leave an open file to a closed event loop."""
    output_queue.close()
    while output_queue._spool.is_busy:  # noqa: ASYNC110 a thread writes what was taken meanwhile
        await asyncio.sleep(0.001)


@settings(deadline=None, max_examples=60)
@given(st.permutations(list(range(8))), st.integers(0, 8), st.integers(1, 64))
def test_any_order_of_arrival_is_the_order_of_numbers(order: list[int], finish_at: int, queue_bytes: int) -> None:
    async def play(folder: Path) -> None:
        output_queue = OutputQueue(Spool(folder), queue_bytes=queue_bytes, queue_items=3)
        for index, number in enumerate([*order, -1]):
            if index == finish_at:
                output_queue.finish(end({"w": 8}))
            if number >= 0:
                output_queue.put("w", number, item(number))
                output_queue.put("w", number, item(99))
        endings = [output_queue.ending]
        assert await drain(output_queue) == list(range(8))
        endings.append(output_queue.ending)
        assert [ending is None for ending in endings] == [True, False]
        await close(output_queue)
        assert output_queue.doubled == 8

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder)))


async def test_an_end_counts_the_outputs_of_every_worker(tmp_path: Path) -> None:
    output_queue = OutputQueue(Spool(tmp_path))
    output_queue.finish(end({"a": 1, "b": 1}))
    output_queue.put("a", 0, item(1))
    assert await drain(output_queue) == [1]
    assert output_queue.ending is None
    output_queue.put("b", 0, item(2))
    assert await drain(output_queue) == [2]
    assert output_queue.ending is not None


@pytest.mark.parametrize("size_bytes", [1, 1 << 20])
async def test_outputs_behind_a_lost_one_fail_the_request_before_they_fill_the_memory(
    size_bytes: int, tmp_path: Path
) -> None:
    output_queue = OutputQueue(Spool(tmp_path))
    output_queue.put("a", 0, item(1))
    for number in range(2, 4000):
        output_queue.put("a", number, item(number, size_bytes))
        assert sum(early.array.nbytes for early, _ in output_queue._senders["a"].early.values()) <= 65 << 20
    assert [int(one.array[0]) for one in await output_queue.take(0)] == [1]
    with pytest.raises(EngineError, match="an output was lost"):
        await output_queue.take(0)
    assert not output_queue._senders["a"].early


async def test_a_failure_is_told_after_what_came_before_it_and_hides_what_comes_later(tmp_path: Path) -> None:
    output_queue = OutputQueue(Spool(tmp_path))
    output_queue.put("a", 0, item(1))
    output_queue.fail(EngineError("broken"))
    output_queue.fail(WorkerLost("later"))
    output_queue.put("a", 1, item(2))
    output_queue.finish(end({"a": 2}))
    assert [int(one.array[0]) for one in await output_queue.take(0)] == [1]
    for _ in range(2):
        with pytest.raises(EngineError):
            await output_queue.take(0)
    assert output_queue.ending is None


async def test_a_failure_after_the_whole_answer_came_changes_nothing(tmp_path: Path) -> None:
    output_queue = OutputQueue(Spool(tmp_path))
    output_queue.put("a", 0, item(1))
    output_queue.finish(end({"a": 1}))
    output_queue.fail(WorkerLost("the conductor died a moment later"))
    assert await drain(output_queue) == [1]
    assert output_queue.ending is not None


async def test_beyond_the_spool_the_reader_has_stalled(tmp_path: Path) -> None:
    output_queue = OutputQueue(Spool(tmp_path, limit=4096), queue_bytes=1024, queue_items=4)
    for number in range(100):
        output_queue.put("a", number, item(number, 64))
    got: list[int] = []
    with pytest.raises(MstarError) as stalled:
        while True:
            got += [int(one.array[0]) for one in await output_queue.take(0)]
    assert stalled.value.code == "stalled"
    assert got == list(range(len(got))) and 16 <= len(got) < 100
    await close(output_queue)
    assert not os.listdir(tmp_path)


async def test_an_end_that_comes_before_its_outputs_is_no_silence(tmp_path: Path) -> None:
    output_queue = OutputQueue(Spool(tmp_path))
    taking = asyncio.create_task(output_queue.take(60.0))
    await asyncio.sleep(0)
    output_queue.finish(end({"worker-0": 1}))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not taking.done()
    output_queue.put("worker-0", 0, item(0))
    assert len(await taking) == 1
    output_queue.close()


@pytest.mark.parametrize("is_fetched", [True, False])
async def test_any_number_of_outputs_waits_for_one_that_is_fetched_and_few_for_a_lost_one(is_fetched: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        output_queue = OutputQueue(Spool(Path(folder) / "spool"))
        if is_fetched:
            output_queue.expect("worker-0", 0)
        for number in range(1, MOST_EARLY + 10):
            output_queue.put("worker-0", number, item(number))
        if is_fetched:
            output_queue.put("worker-0", 0, item(0))
            assert await drain(output_queue) == list(range(MOST_EARLY + 10))
        else:
            with pytest.raises(EngineError, match="an output was lost"):
                await output_queue.take(0)
        await close(output_queue)
