"""Staging copies every value to its own field and pads it with zeros; no host buffer is written before it was read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from mstar_core.engine.attention.staging import BufferRing, Staging, host_array, port_field
from mstar_core.engine.transfers import SMALL_BYTES, contiguous_runs, is_small_on_host

CPU = torch.device("cpu")
MOST = 4
FIELDS = {"places": (torch.int64, 5), "plan": (torch.float32, 12), "end": (torch.int32, 3), "half": (torch.bfloat16, 4)}


def test_values_reach_their_fields_and_what_is_left_is_zero() -> None:
    block = Staging(FIELDS, CPU)
    plan = np.arange(10, dtype=np.float32).reshape(2, 5)
    halves = torch.tensor([1.5, -2.25, 3.0], dtype=torch.bfloat16)
    block.put({"places": np.array([7, 8]), "plan": plan, "end": np.array([1, 2, 3]), "half": host_array(halves)})
    assert block.device["places"].tolist() == [7, 8, 0, 0, 0]
    assert block.device["plan"].tolist() == [*range(10), 0, 0]
    assert block.device["end"].tolist() == [1, 2, 3]
    assert block.device["half"].tolist() == [1.5, -2.25, 3.0, 0.0]
    block.put({"places": np.broadcast_to(np.int64(4), (2,)), "end": np.array([9], dtype=np.int32)})
    assert block.device["places"].tolist() == [4, 4, 0, 0, 0] and block.device["end"].tolist() == [9, 0, 0]
    assert not block.device["plan"].any(), "a field before the last value is cleared"
    assert block.device["half"].tolist() == [1.5, -2.25, 3.0, 0.0], "fields behind the last value stay as they are"
    block.put({"half": host_array(halves[1:2])})
    assert block.device["half"].tolist() == [-2.25, -2.25, 3.0, 0.0], "the final field is copied as far as its value"


def test_a_value_without_a_field_or_too_large_for_it_is_an_error() -> None:
    block = Staging(FIELDS, CPU)
    with pytest.raises(AssertionError):
        block.put({"place": np.zeros(1)})
    with pytest.raises(ValueError):
        block.put({"end": np.zeros(4, dtype=np.int32)})


def test_a_port_is_never_taken_for_a_field_of_attention() -> None:
    assert port_field("start") != "start" and port_field("start") != port_field("end")


def test_neighbours_in_memory_are_one_stretch_and_others_are_not() -> None:
    packed, other = torch.arange(24.0).view(4, 2, 3), torch.zeros(2, 3)
    values = [packed[0], packed[1], packed[3], other, packed[2].t().contiguous(), packed[2].t()]
    found = list(contiguous_runs(values))
    assert [span for span, _ in found] == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5), slice(5, 6)]
    for span, whole in found:
        assert torch.equal(whole, torch.stack(values[span]))
    assert [span for span, _ in contiguous_runs([])] == []


def test_large_neighbours_stay_apart() -> None:
    rows = torch.zeros(3, SMALL_BYTES // 4 + 1)
    assert [span for span, _ in contiguous_runs(list(rows))] == [slice(0, 1), slice(1, 2), slice(2, 3)]


def test_small_values_of_the_host_wait_for_their_step() -> None:
    assert is_small_on_host(torch.zeros(SMALL_BYTES, dtype=torch.uint8)) and not is_small_on_host(
        torch.zeros(SMALL_BYTES // 4 + 1)
    )
    assert not is_small_on_host(torch.zeros(1, device="meta"))


@dataclass
class Mark:
    is_past: bool = False
    waited: bool = False

    def query(self) -> bool:
        return self.is_past

    def synchronize(self) -> None:
        self.waited = self.is_past = True


def test_a_buffer_is_used_again_only_when_its_copy_is_over() -> None:
    marks: list[Mark] = []
    numbers = iter(range(1, 100))

    def mark() -> Mark:
        marks.append(Mark())
        return marks[-1]

    turns, used = BufferRing(0, lambda: next(numbers), mark, MOST), list[int]()
    turns.use(used.append)
    turns.use(used.append)
    assert used == [0, 1], "the first is still on its way"
    marks[0].is_past = True
    turns.use(used.append)
    assert used == [0, 1, 0]
    for _ in range(MOST - 2):
        turns.use(used.append)
    assert len(set(used)) == MOST and not any(each.waited for each in marks)
    turns.use(used.append)
    assert used[-1] == 1 and marks[1].waited and not marks[2].waited, "the oldest is waited for, and no other"
    assert len(set(used)) == MOST


def test_copies_that_follow_each_other_share_the_event_of_the_last_one() -> None:
    marks: list[Mark] = []
    numbers = iter(range(1, 100))

    def mark() -> Mark:
        marks.append(Mark())
        return marks[-1]

    turns, used = BufferRing(0, lambda: next(numbers), mark, MOST), list[int]()
    for _ in range(2):
        turns.use(used.append, more=True)
    assert not marks
    turns.use(used.append)
    assert len(marks) == 1 and used == [0, 1, 2]
    for _ in range(MOST):
        turns.use(used.append, more=True)
    assert marks[0].waited, "all buffers are on their way, so the oldest copies are waited for"
    marks[0].is_past = True
    turns.use(used.append, more=True)
    assert len(marks) == 2 and marks[1].waited, "copies without an event get one before they are waited for"
