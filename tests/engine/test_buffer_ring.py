"""Host buffers are not written again before the device has read them."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_core.engine.attention.staging import BufferRing

MOST = 4


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
