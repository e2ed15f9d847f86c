"""Decode state of a KV node on the host, in flat arrays: one slot per sequence. Owned by the node's scheduler.

A request gets the slots of all its branches at once, so that no two requests wait for each other's. The device has
arrays of its own, which steps read and write; changes made here reach them by the updates of the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mstar_core.engine.steps.updates import NO_ID, STOP_WIDTH, SlotChanges
from mstar_core.graph.declare.sampling import SamplingParams


class Slots:
    """State of every slot, and the changes that the device does not have yet.

    last, left, drawn, key int64 [slots]; next_position int64 [slots], or float64 at a node with float positions;
    history int32 [slots, max_tokens + 1] (ids in cache order up to the sequence's length, NO_ID for tokens that are no
    ids); stop_ids int64 [slots, width], padded with NO_ID. vocab: ids that can be drawn, 0 without sampling.
    """

    def __init__(self, count: int, max_tokens: int, vocab: int, position_dtype: torch.dtype = torch.int64) -> None:
        self.count = count
        self.vocab = vocab
        self._is_float = position_dtype.is_floating_point
        self.last = np.full(count, NO_ID, dtype=np.int64)
        self.left = np.zeros(count, dtype=np.int64)
        self.next_position = np.zeros(count, dtype=np.float64 if self._is_float else np.int64)
        self.drawn = np.zeros(count, dtype=np.int64)
        self.key = np.full(count, NO_ID, dtype=np.int64)
        # Not initialised: only written entries are read, and untouched memory is never allocated.
        self.history = np.empty((count, max_tokens + 1), dtype=np.int32)
        self.stop_ids = np.full((count, STOP_WIDTH), NO_ID, dtype=np.int64)
        self.sampling: list[SamplingParams] = [SamplingParams()] * count
        self._free = list(range(count - 1, -1, -1))
        self._moved: dict[int, int] = {}
        self._armed: dict[int, None] = {}
        self._blank: dict[int, None] = {}
        self._seen: dict[int, list[np.ndarray]] = {}
        self._counted: dict[int, list[np.ndarray]] = {}

    @property
    def used(self) -> int:
        """Slots that requests hold."""
        return self.count - len(self._free)

    def take(self, count: int, sampling: SamplingParams) -> list[int] | None:
        """Take fresh slots for one request. None if there are not that many."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for slot in taken:
            self._clear(slot)
            self.sampling[slot] = sampling
        return taken

    def give_back(self, slots: Sequence[int]) -> None:
        """Free slots. They are cleared when they are taken again."""
        self._free.extend(slots)

    def copy(self, source: int, into: int) -> None:
        """Copy the host state of slot `source` to slot `into`, as for a forked branch."""
        for array in (self.last, self.next_position, self.drawn, self.history):
            array[into] = array[source]

    def restart(self, slot: int) -> None:
        """Forget the sequence of a slot. Its draws count on, so that none repeats the random numbers of another."""
        drawn = self.drawn[slot]
        self._clear(slot)
        self.drawn[slot] = drawn

    def position(self, slot: int) -> int | float:
        """Return the position of a slot's next token."""
        position: int | float = self.next_position[slot].item()
        return position

    def positions(self, slots: np.ndarray) -> np.ndarray:
        """Return the positions of these slots' next tokens, as the module gets them: int64 or float32 [n]."""
        positions: np.ndarray = self.next_position[slots]
        return positions.astype(np.float32) if self._is_float else positions

    def set_last(self, slot: int, value: int) -> None:
        """Make `value` the id that the next iteration reads."""
        self.last[slot] = value
        self._moved[slot] = value

    def see(self, slot: int, ids: np.ndarray) -> None:
        """Mark ids (int64 [n]) as seen for the repetition penalty."""
        self._seen.setdefault(slot, []).append(ids)

    def count_drawn(self, slot: int, ids: np.ndarray) -> None:
        """Count ids (int64 [n]) as drawn, for the penalties that depend on it."""
        self._counted.setdefault(slot, []).append(ids)

    def begin_loop(self, slot: int, key: int, iterations: int, stop_ids: Sequence[int]) -> None:
        """Prepare a slot for a resident loop."""
        if len(stop_ids) >= self.stop_ids.shape[1]:
            wider = np.full((self.count, len(stop_ids) + 1), NO_ID, dtype=np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.key[slot] = key
        self.left[slot] = iterations
        self.stop_ids[slot] = NO_ID
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
        self._armed[slot] = None

    def take_changes(self) -> SlotChanges | None:
        """Return what has changed since the last call; None for nothing."""
        if not (self._moved or self._armed or self._blank or self._seen or self._counted):
            return None
        moved = np.array([*self._moved.items()], dtype=np.int64).T.copy() if self._moved else None
        slots = np.array([*self._armed], dtype=np.int64)
        armed = np.concatenate([slots[:, None], self.stop_ids[slots]], axis=1) if self._armed else None
        blank = np.array([*self._blank], dtype=np.int64) if self._blank else None
        seen, counted = self._flat(self._seen), self._flat(self._counted)
        for pending in (self._moved, self._armed, self._blank, self._seen, self._counted):
            pending.clear()
        return SlotChanges(moved=moved, armed=armed, blank=blank, seen=seen, counted=counted)

    def _flat(self, pending: dict[int, list[np.ndarray]]) -> np.ndarray | None:
        """Return the flat indices of ids by slot, int64 [n]; None for none."""
        parts = [slot * self.vocab + ids for slot, lists in pending.items() for ids in lists]
        return np.concatenate(parts) if parts else None

    def _clear(self, slot: int) -> None:
        self.last[slot] = self.key[slot] = NO_ID
        self.left[slot] = self.next_position[slot] = self.drawn[slot] = 0
        # The last id on the device is written by a draw or by `set_last` before a step reads it.
        self._moved.pop(slot, None)
        if self.vocab:
            self._blank[slot] = None
        self._seen.pop(slot, None)
        self._counted.pop(slot, None)
