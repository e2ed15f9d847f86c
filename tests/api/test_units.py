"""Chunks of stream walks that are delivered as a whole: what a new attempt need not compute again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mstar_core.api.output.units import Delivered, NewUnits, OutputItem


def take(units: NewUnits, *chunks: tuple[int, int]) -> None:
    """Take outputs of (step, samples)."""
    for step, samples in chunks:
        item = OutputItem(modality="audio", port="pcm", array=np.zeros(samples, np.int16), meta={"step": step})
        units.take(item)


def attempts(*attempts: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the chunks of a port after attempts."""
    delivered = Delivered()
    for number, chunks in enumerate(attempts):
        take(NewUnits(delivered, is_first=not number), *chunks)
    return delivered.chunks.get("pcm")


def test_chunks_are_counted_with_their_units() -> None:
    assert attempts([(0, 7), (1, 5)]) == (2, 12)
    assert attempts([(0, 7), (2, 5)]) == (3, 12), "a chunk without samples has no output"


def test_a_later_attempt_counts_on_only_behind_what_is_counted() -> None:
    assert attempts([(0, 7), (1, 5)], [(0, 7)]) == (2, 12)
    assert attempts([(0, 7), (1, 5)], [(0, 7), (1, 5), (2, 4)]) == (3, 16)


def test_a_port_of_several_walks_has_no_count() -> None:
    assert attempts([(0, 7), (1, 5), (0, 7)]) == (-1, 0)
    assert attempts([(0, 7), (1, 5), (0, 7)], [(0, 7), (1, 5)]) == (-1, 0)


def test_left_out_units_count() -> None:
    delivered = Delivered()
    take(NewUnits(delivered, is_first=True), (0, 7), (1, 5))
    units = NewUnits(delivered, is_first=False)
    item = OutputItem(modality="audio", port="pcm", array=np.zeros(4, np.int16), meta={"step": 2})
    assert units.take(item, skipped=12) is item
    assert delivered.chunks["pcm"] == (3, 16)
