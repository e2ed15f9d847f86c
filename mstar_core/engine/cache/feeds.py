"""Stream items of resident loops on the host: one row of ids per slot. Owned by the scheduler of a KV node.

Cost model: an id that arrives is one dictionary lookup and one write; a step reads and counts all sequences in a few
numpy calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

NO_ITEM: Final = -1
"""Value of the feed once its stream has ended."""


@dataclass(slots=True)
class _Early:
    """Items of a job that has no slot yet. slot: -1 until its loop begins."""

    handle: int
    is_empty_after_end: bool
    ids: list[int] = field(default_factory=list)
    has_ended: bool = False
    slot: int = -1


class Feeds:
    """Items of every loop that a stream feeds. An item counts as taken when the step that reads it is launched.

    items: int64 [slots, most]; came, taken: int64 [slots], items so far; goes_on: bool [slots], the stream has ended
    and the loop continues with NO_ITEM; has_ended: bool [slots].
    """

    def __init__(self, slots: int, most: int) -> None:
        # Not initialised: untouched memory is never allocated.
        self.items = np.empty((slots, most), dtype=np.int64)
        self.came = np.zeros(slots, dtype=np.int64)
        self.taken = np.zeros(slots, dtype=np.int64)
        self.goes_on = np.zeros(slots, dtype=np.bool_)
        self.has_ended = np.zeros(slots, dtype=np.bool_)
        self._jobs: dict[int, _Early] = {}

    # -- jobs --------------------------------------------------------------------------------------------------------

    def open(self, key: int, handle: int, *, empty_after_end: bool) -> None:
        """Expect items of a job that was submitted."""
        self._jobs[key] = _Early(handle, empty_after_end)

    def begin(self, key: int, slot: int) -> None:
        """Give a job its row and move the items that came before into it."""
        job = self._jobs[key]
        self.came[slot] = self.taken[slot] = 0
        self.goes_on[slot] = self.has_ended[slot] = False
        job.slot = slot
        early, job.ids = job.ids, []
        self.add(key, early, ended=job.has_ended)

    def end(self, key: int) -> None:
        """Drop a job. Items that still come for it are ignored."""
        self._jobs.pop(key, None)

    def forget(self, handle: int) -> None:
        """Drop all jobs of a request."""
        for key in [key for key, job in self._jobs.items() if job.handle == handle]:
            del self._jobs[key]

    def add(self, key: int, ids: Sequence[int], *, ended: bool) -> None:
        """Append items of a job. ended: no more follow."""
        job = self._jobs.get(key)
        if job is None:
            return
        slot = job.slot
        if slot < 0:
            job.ids.extend(ids)
            job.has_ended = job.has_ended or ended
            return
        if ids:
            at = int(self.came[slot])
            # More items than tokens fit the cache are never read.
            count = min(len(ids), self.items.shape[1] - at)
            self.items[slot, at : at + count] = ids[:count]
            self.came[slot] = at + count
        if ended:
            self.has_ended[slot] = True
            self.goes_on[slot] = job.is_empty_after_end

    # -- steps -------------------------------------------------------------------------------------------------------

    def values(self, slots: np.ndarray) -> np.ndarray:
        """Return the next item of each of these slots, int64 [n]; NO_ITEM after the end."""
        taken = self.taken[slots]
        items = self.items[slots, np.minimum(taken, self.items.shape[1] - 1)]
        values: np.ndarray = np.where(taken < self.came[slots], items, NO_ITEM)
        return values

    def take(self, slots: np.ndarray) -> None:
        """Count the items that a launched step reads."""
        self.taken[slots] += 1

    def dry(self, slots: np.ndarray) -> np.ndarray:
        """Return, as bool [n], which of these slots have no item for another iteration."""
        dry: np.ndarray = (self.taken[slots] >= self.came[slots]) & ~self.goes_on[slots]
        return dry

    def is_dry(self, slot: int) -> bool:
        """Return whether a slot has no item for another iteration."""
        return bool(self.taken[slot] >= self.came[slot]) and not self.goes_on[slot]

    def is_dry_after(self, slot: int, count: int) -> bool:
        """Return whether a slot will have no item for another iteration once `count` are taken."""
        return bool(self.taken[slot] + count >= self.came[slot]) and not self.goes_on[slot]

    def coming(self, slot: int, most: int) -> np.ndarray:
        """Return up to `most` next items of a slot without taking them, int64; NO_ITEM after the end."""
        at, came = int(self.taken[slot]), int(self.came[slot])
        items = self.items[slot, at : min(at + most, came)]
        after = most - len(items) if self.goes_on[slot] else 0
        return np.concatenate([items, np.full(after, NO_ITEM, dtype=np.int64)])

    def is_over(self, slot: int) -> bool:
        """Return whether a slot's stream has ended, all its items are taken, and its loop ends with it."""
        return self.is_dry(slot) and bool(self.has_ended[slot])
