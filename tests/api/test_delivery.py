"""Replay of a response: outputs pass up to those that the client has, whatever the pieces in which they come."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.api.handover.delivery import UnitGate
from mstar_core.api.output.units import OutputItem

IDS = 24


def text(ids: list[int]) -> OutputItem:
    """An output of ids."""
    return OutputItem(modality="text", port="text", array=np.array(ids, np.int32))


def ids_of(items: list[OutputItem]) -> list[int]:
    """The ids of some outputs."""
    return [int(value) for item in items for value in item.array]


@given(
    delivered=st.integers(0, IDS),
    torn=st.integers(0, IDS),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=IDS),
)
def test_each_stage_ends_at_its_unit_and_nothing_is_lost(delivered: int, torn: int, cuts: list[int]) -> None:
    marks = sorted((delivered, torn))
    gate = UnitGate([{"text": mark} for mark in marks])
    arriving, start = [], 0
    while start < IDS:
        for cut in cuts:
            arriving.append(text(list(range(start, min(IDS, start + cut)))))
            start = min(IDS, start + cut)
    passed: list[int] = []
    for mark in marks:
        while not gate.is_reached:
            passed += ids_of(gate.take([arriving.pop(0)]))
        assert passed == list(range(mark))
        gate.advance()
        if gate.is_open:
            break
        passed += ids_of(gate.take(()))
    passed += ids_of(gate.take(()))
    for item in arriving:
        passed += ids_of(gate.take([item]))
    assert passed == list(range(IDS)) and gate.is_empty


def test_a_port_that_is_ahead_waits_for_the_others() -> None:
    gate = UnitGate([{"text": 2, "image": 1}])
    image = OutputItem(modality="image", port="image", array=np.zeros((2, 2), np.uint8))
    assert ids_of(gate.take([text([0, 1, 2, 3])])) == [0, 1]
    assert not gate.is_reached
    assert gate.take([image, image]) == [image]
    assert gate.is_reached
    gate.advance()
    rest = gate.take(())
    assert ids_of(rest[:1]) == [2, 3] and rest[1:] == [image]
