"""Outputs of several attempts: no unit twice, none lost, and what was delivered never changes."""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_core.api.output.queue import OutputQueue
from mstar_core.api.output.spool import Spool
from mstar_core.api.output.units import Delivered, OutputItem
from mstar_core.errors import EngineError
from mstar_core.messages.requests import RequestFinished
from mstar_core.plugin.surface import PARTIAL_IMAGE, PROGRESS

IDS, SAMPLES, STEPS, IMAGES = 40, 60, 6, 3
PROGRESS_STEPS = 4
"""Progress events before each image; one image in the making follows the second."""


def ids(start: int, stop: int, shift: int = 0) -> OutputItem:
    return OutputItem(modality="text", port="token", array=np.arange(start, stop, dtype=np.int64) + shift)


def samples(start: int, stop: int, shift: int = 0) -> OutputItem:
    return OutputItem(modality="audio", port="pcm", array=np.arange(start, stop, dtype=np.int16) + shift)


def whole(modality: str, port: str, value: int) -> OutputItem:
    return OutputItem(modality=modality, port=port, array=np.full((2, 2), value, dtype=np.uint8))


def progress(step: int) -> OutputItem:
    return OutputItem(modality=PROGRESS, port="progress", array=np.array([step, PROGRESS_STEPS], dtype=np.int64))


def images() -> list[OutputItem]:
    """Return three images with their events, in order."""
    items: list[OutputItem] = []
    for number in range(IMAGES):
        for step in range(1, PROGRESS_STEPS + 1):
            items.append(progress(step))
            if step == 2:
                items.append(whole(PARTIAL_IMAGE, "image", 100 + number))
        items.append(whole("image", "image", number))
    return items


@st.composite
def cut(draw: st.DrawFn, total: int) -> list[tuple[int, int]]:
    """Cut `total` units into outputs."""
    bounds = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=6))})
    return list(pairwise(bounds))


@dataclass(slots=True)
class Plan:
    """One attempt: the outputs of two workers, how many of each arrive, the order of the first ones, and the share of
    the delivered units that the workers leave out.
    """

    speaker: list[OutputItem]
    painter: list[OutputItem]
    arrived: tuple[int, int]
    shuffle: list[int]
    skips: float


@st.composite
def attempts(draw: st.DrawFn) -> list[Plan]:
    plans = []
    for number in range(draw(st.integers(1, 4))):
        shift = 1000 * number if draw(st.booleans()) else 0  # a divergence: this attempt computes other values
        texts = [ids(*part, shift) for part in draw(cut(IDS))]
        sounds = [samples(*part, shift) for part in draw(cut(SAMPLES))]
        speaker = [*texts, *sounds, *(whole("action", "steps", step) for step in range(STEPS))]
        painter = images()
        arrived = draw(st.integers(0, len(speaker))), draw(st.integers(0, len(painter)))
        plans.append(Plan(speaker, painter, arrived, draw(st.permutations(range(8))), draw(st.floats(0, 1))))
    return plans


def without(items: Sequence[OutputItem], delivered: Delivered, share: float) -> list[tuple[OutputItem, int]]:
    """Leave out a share of what each port has delivered, as a worker that skips whole outputs does."""
    left_out: dict[str, int] = defaultdict(int)
    at: dict[str, int] = defaultdict(int)
    kept: list[tuple[OutputItem, int]] = []
    for item in items:
        if item.modality in (PROGRESS, PARTIAL_IMAGE):
            kept.append((item, 0))
            continue
        count = len(item.array) if item.modality in ("text", "audio") else 1
        at[item.port] += count
        if at[item.port] <= share * delivered.units.get(item.port, 0):
            left_out[item.port] += count
        else:
            kept.append((item, left_out.pop(item.port, 0)))
    return kept


async def play(folder: Path, plans: list[Plan]) -> list[OutputItem]:
    """Play attempts, of which the last one arrives whole, and return what a client gets. It reads between them."""
    spool = Spool[OutputItem](folder)
    output_queue, heard = OutputQueue(spool, queue_bytes=256, queue_items=3), list[OutputItem]()
    for number, plan in enumerate(plans):
        if number:
            output_queue.renew(lambda: None)
        is_last = number == len(plans) - 1
        emitted = {}
        for worker, items, arrived in (
            ("speaker", plan.speaker, plan.arrived[0]),
            ("painter", plan.painter, plan.arrived[1]),
        ):
            sent = without(items, output_queue.delivered, plan.skips if number else 0.0)
            emitted[worker] = len(sent)
            order = list(range(len(sent)))
            head = [place for place in plan.shuffle if place < len(order)]
            order = [*head, *order[len(head) :]] if sorted(head) == list(range(len(head))) else order
            for seq in order if is_last else order[:arrived]:
                output_queue.put(worker, seq, *sent[seq])
                output_queue.put(worker, seq, *sent[seq])  # a duplicate
        if is_last:
            output_queue.finish(RequestFinished(handle=1, reason="stop", emitted=emitted))
        while taken := await output_queue.take(0):
            heard += taken
    assert output_queue.ending is not None
    output_queue.close()
    while spool.is_busy:  # noqa: ASYNC110 a thread ends it
        await asyncio.sleep(0)
    return heard


def values(heard: list[OutputItem], modality: str) -> list[int]:
    return [int(value) for item in heard if item.modality == modality for value in item.array.reshape(-1)]


@settings(deadline=None, max_examples=150)
@given(attempts())
def test_any_cuts_and_attempts_give_each_unit_once(plans: list[Plan]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        heard = asyncio.run(play(Path(folder), plans))
    for modality, total in (("text", IDS), ("audio", SAMPLES)):
        assert [value % 1000 for value in values(heard, modality)] == list(range(total)), modality
    assert [int(item.array[0, 0]) for item in heard if item.modality == "action"] == list(range(STEPS))
    assert [int(item.array[0, 0]) for item in heard if item.modality == "image"] == list(range(IMAGES))
    assert [int(item.array[0, 0]) for item in heard if item.modality == PARTIAL_IMAGE] == [100, 101, 102]
    assert [value for value in values(heard, PROGRESS)[::2]] == list(range(1, PROGRESS_STEPS + 1)) * IMAGES


@settings(deadline=None, max_examples=60)
@given(cut(IDS), cut(IDS), st.integers(0, IDS))
def test_a_divergence_never_changes_what_was_delivered(
    first: list[tuple[int, int]], second: list[tuple[int, int]], arrived: int
) -> None:
    async def diverge(folder: Path) -> tuple[list[int], list[int]]:
        output_queue = OutputQueue(Spool(folder))
        for seq, part in enumerate(first[:arrived]):
            output_queue.put("w", seq, ids(*part))
        before = values(await output_queue.take(0), "text")
        output_queue.renew(lambda: None)
        for seq, part in enumerate(second):
            output_queue.put("w", seq, ids(*part, 1000))
        after = values(await output_queue.take(0), "text")
        output_queue.close()
        return before, after

    with tempfile.TemporaryDirectory() as folder:
        before, after = asyncio.run(diverge(Path(folder)))
    assert before == list(range(len(before)))
    assert after == [value + 1000 for value in range(len(before), IDS)]


async def test_progress_at_other_steps_never_goes_back(tmp_path: Path) -> None:
    output_queue = OutputQueue(Spool(tmp_path))
    for seq, step in enumerate((1, 3)):
        output_queue.put("w", seq, progress(step))
    output_queue.renew(lambda: None)
    for seq, step in enumerate((2, 3, 4)):
        output_queue.put("w", seq, progress(step))
    assert values(await output_queue.take(0), PROGRESS)[::2] == [1, 3, 4]
    output_queue.close()


async def test_a_new_process_goes_on_from_the_units_that_another_one_has_delivered(tmp_path: Path) -> None:
    first = OutputQueue(Spool(tmp_path))
    first.put("w", 0, ids(0, 7))
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(first.delivered), type=Delivered)
    second = OutputQueue(Spool(tmp_path), delivered=kept)
    second.put("w", 0, ids(0, 10))
    assert values(await second.take(0), "text") == [7, 8, 9]
    first.close()
    second.close()


async def test_news_of_an_attempt_come_once_with_its_first_new_unit_or_its_end(tmp_path: Path) -> None:
    output_queue, news = OutputQueue(Spool(tmp_path)), list[int]()
    output_queue.put("w", 0, ids(0, 5))
    output_queue.renew(lambda: news.append(1))
    output_queue.put("w", 0, ids(0, 5))
    assert news == []
    output_queue.put("w", 1, ids(5, 6))
    output_queue.put("w", 2, ids(6, 7))
    assert news == [1]
    output_queue.renew(lambda: news.append(2))
    output_queue.finish(RequestFinished(handle=1, reason="stop"))
    assert news == [1, 2]
    output_queue.close()


async def test_units_left_out_that_the_client_lacks_are_an_error(tmp_path: Path) -> None:
    output_queue = OutputQueue(Spool(tmp_path))
    output_queue.put("w", 0, ids(0, 5))
    output_queue.renew(lambda: None)
    output_queue.put("w", 0, ids(6, 9), 6)
    assert values(await output_queue.take(0), "text") == [0, 1, 2, 3, 4]
    with pytest.raises(EngineError):
        await output_queue.take(0)
    output_queue.close()
