"""Buffers that plans leave from are not written before the device has read them."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_core.engine.attention.host_buffers import MOST, Turns


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

    turns, used = Turns(0, lambda: next(numbers), mark), list[int]()
    turns.plan(used.append)
    turns.plan(used.append)
    assert used == [0, 1], "the first is still on its way"
    marks[0].is_past = True
    turns.plan(used.append)
    assert used == [0, 1, 0]
    for _ in range(MOST - 2):
        turns.plan(used.append)
    assert len(set(used)) == MOST and not any(each.waited for each in marks)
    turns.plan(used.append)
    assert used[-1] == 1 and marks[1].waited and not marks[2].waited, "the oldest is waited for, and no other"
    assert len(set(used)) == MOST
