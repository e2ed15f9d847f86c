"""Work in forked processes: all of it is done, and what fails, dies or stalls there is left to the caller."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mstar_core.process.forked_work import ForkedStream, run_forked


def children() -> set[str]:
    """Return the numbers of this process's children, zombies included."""
    return {child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}


def test_each_piece_is_done_once_and_by_other_processes(tmp_path: Path) -> None:
    def piece(number: int) -> None:
        (tmp_path / f"{number}.{os.getpid()}").touch(exist_ok=False)

    told: list[int] = []
    done = run_forked([lambda number=number: piece(number) for number in range(40)], 3, told.append)  # type: ignore[misc]
    names = [path.name.split(".") for path in tmp_path.iterdir()]
    assert sorted(int(number) for number, _ in names) == sorted(done) == list(range(40))
    assert str(os.getpid()) not in {process for _, process in names}
    assert told[-1] == 40 and told == sorted(told)


def test_a_piece_that_raises_is_missing_and_the_others_are_done() -> None:
    def fail() -> None:
        raise ValueError("no kernel")

    assert sorted(run_forked([fail, lambda: None, fail, lambda: None], 2)) == [1, 3]


def test_each_process_is_prepared_once() -> None:
    prepared: list[int] = []

    def check() -> None:
        if prepared != [1]:
            raise ValueError(prepared)

    assert sorted(run_forked([check] * 6, 2, prepare=lambda: prepared.append(1))) == list(range(6))
    assert not prepared


def test_a_process_that_dies_loses_its_piece_only() -> None:
    assert sorted(run_forked([lambda: os._exit(3), lambda: None, lambda: None], 2)) == [1, 2]


def test_a_process_that_stalls_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    started, before = time.monotonic(), children()
    assert sorted(run_forked([lambda: time.sleep(60), lambda: None], 2, stall_s=0.3)) == [1]
    assert time.monotonic() - started < 30 and "has stalled" in caplog.text
    assert children() <= before


def test_a_stream_does_each_text_once_while_more_are_made(tmp_path: Path) -> None:
    def work(text: str) -> None:
        if text == "bad":
            raise ValueError(text)
        (tmp_path / f"{text}.{os.getpid()}").touch(exist_ok=False)

    prepared: list[int] = []
    stream = ForkedStream(work, 3, lambda: prepared.append(1))
    numbers = [stream.put(text) for text in ("a", "bad", *map(str, range(20)))]
    while not [*tmp_path.iterdir()]:
        time.sleep(0.01)
    told: list[int] = []
    done = stream.finish(told.append)
    assert numbers == list(range(22)) and sorted(done) == [0, *range(2, 22)]
    assert sorted(path.name.split(".")[0] for path in tmp_path.iterdir()) == sorted(["a", *map(str, range(20))])
    assert told[-1] == 22 and not prepared


def test_a_stream_whose_processes_are_behind_takes_no_more() -> None:
    stream = ForkedStream(lambda text: time.sleep(60), 1)
    taken = 0
    while stream.put("x" * 40_000) is not None:
        taken += 1
    assert 1 <= taken < 100
    assert stream.put("x" * 100_000) is None
    assert stream.finish(stall_s=0.2) == {}


def test_a_stream_without_texts_ends_at_once() -> None:
    assert ForkedStream(print, 2).finish() == {}
