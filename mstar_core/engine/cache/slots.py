"""Flat decode state of a KV node: one slot per sequence, in host and device arrays. Owned by the KV engine.

A request gets the slots of all its branches at once, so that no two requests wait for each other's.
Scheduling reads the host arrays; a step reads and writes the device arrays without waiting for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from mstar_core.engine.base import SamplingParams
from mstar_core.engine.transfers import upload

NO_ID: Final = -1
"""Marks an entry that holds no id."""

_STOP_WIDTH: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChanges:
    """Host changes that the device arrays do not have yet; None where there are none.

    moved: int64 [2, n], slots and their last ids. armed: int64 [n, 1 + width], slots and their stop ids. blank: int64
    [n], slots whose seen ids and counts are cleared. met: int64 [n], flat indices of seen ids.
    """

    moved: np.ndarray | None = None
    armed: np.ndarray | None = None
    blank: np.ndarray | None = None
    met: np.ndarray | None = None


class Slots:
    """Per-slot state of every sequence.

    Host: last, left, drawn, key int64 [slots]; adjusts bool [slots], see `SamplingParams`; next_position int64 [slots],
    or float64 at a node with float positions; history int32 [slots, max_tokens + 1] (ids in cache order up to the
    sequence's length, NO_ID for tokens without an id); stop_ids int64 [slots + 1, width], padded with NO_ID.
    Device: device_last int64 [slots + 1]; device_seen bool [slots + 1, vocab]; device_stop_ids as on the host;
    device_stopped bool [slots + 1]; counts of drawn ids once a step adjusts logits by them. The last entry is a spare
    slot for the padding of captured steps.
    `flush` copies the host's changes to the device in a fixed number of calls.
    on_changes, on_copy: called before the device arrays change, for the followers of a tensor-parallel group.
    """

    def __init__(
        self, count: int, max_tokens: int, vocab: int, device: torch.device, position_dtype: torch.dtype = torch.int64
    ) -> None:
        self.count = count
        self.device = device
        self.position_dtype = position_dtype
        self.last = np.full(count, NO_ID, dtype=np.int64)
        self.left = np.zeros(count, dtype=np.int64)
        self.next_position = np.zeros(count, dtype=np.float64 if position_dtype.is_floating_point else np.int64)
        self.drawn = np.zeros(count, dtype=np.int64)
        self.key = np.full(count, NO_ID, dtype=np.int64)
        # Not initialised: only written entries are read, and untouched memory is never allocated.
        self.history = np.empty((count, max_tokens + 1), dtype=np.int32)
        self.stop_ids = np.full((count + 1, _STOP_WIDTH), NO_ID, dtype=np.int64)
        self.sampling: list[SamplingParams] = [SamplingParams()] * count
        self.adjusts = np.zeros(count, dtype=np.bool_)
        self.device_last = torch.full((count + 1,), NO_ID, dtype=torch.int64, device=device)
        self.device_seen = torch.zeros((count + 1, vocab), dtype=torch.bool, device=device)
        self.device_stop_ids = torch.from_numpy(self.stop_ids.copy()).to(device)
        self.device_stopped = torch.zeros(count + 1, dtype=torch.bool, device=device)
        self._counts: torch.Tensor | None = None
        self._free = list(range(count - 1, -1, -1))
        self._moved: dict[int, int] = {}
        self._armed: dict[int, None] = {}
        self._blank: dict[int, None] = {}
        self._met: dict[int, list[np.ndarray]] = {}
        self.on_changes: Callable[[SlotChanges], None] | None = None
        self.on_copy: Callable[[int, int], None] | None = None

    @property
    def spare(self) -> int:
        """The slot that no request gets."""
        return self.count

    @property
    def vocab(self) -> int:
        """Ids of the node's vocabulary; 0 for a node that does not sample."""
        return self.device_seen.shape[1]

    @property
    def used(self) -> int:
        """Slots that requests hold."""
        return self.count - len(self._free)

    def device_counts(self) -> torch.Tensor:
        """Return how often each id was drawn, int32 [slots + 1, vocab]. The first call allocates it."""
        if self._counts is None:
            self._counts = torch.zeros(self.device_seen.shape, dtype=torch.int32, device=self.device)
        return self._counts

    def take(self, count: int, sampling: SamplingParams) -> list[int] | None:
        """Take fresh slots for one request. None if there are not that many."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for slot in taken:
            self._clear(slot)
            self.sampling[slot] = sampling
        self.adjusts[taken] = sampling.adjusts
        return taken

    def give_back(self, slots: Sequence[int]) -> None:
        """Free slots. They are cleared when they are taken again."""
        self._free.extend(slots)

    def copy(self, source: int, into: int) -> None:
        """Copy the state of slot `source` to slot `into`, as for a forked branch."""
        for array in (self.last, self.next_position, self.drawn, self.history):
            array[into] = array[source]
        if not self.device_seen.shape[1]:
            return  # without a vocabulary, no step reads the device arrays
        self.flush()
        if self.on_copy is not None:
            self.on_copy(source, into)
        self.copy_on_device(source, into)

    def copy_on_device(self, source: int, into: int) -> None:
        """Copy the device state of slot `source` to slot `into`."""
        self.device_last[into] = self.device_last[source]
        self.device_seen[into] = self.device_seen[source]
        if self._counts is not None:
            self._counts[into] = self._counts[source]

    def export(self, slot: int, length: int) -> tuple[np.ndarray, torch.Tensor | None, torch.Tensor | None]:
        """Return the ids of a slot's first `length` tokens, int32, its seen ids, bool [vocabulary], and their counts.

        The latter two are None where no penalty reads them. The counts are int32 [vocabulary].
        """
        seen = counts = None
        if self.device_seen.shape[1]:
            self.flush()
            sampling = self.sampling[slot]
            seen = self.device_seen[slot].clone() if sampling.repetition_penalty != 1 else None
            counts = self.device_counts()[slot].clone() if sampling.adjusts else None
        return self.history[slot, :length].copy(), seen, counts

    def restore(
        self,
        slot: int,
        *,
        last: int,
        drawn: int,
        position: int | float,
        history: np.ndarray,
        seen: torch.Tensor | None,
        counts: torch.Tensor | None = None,
    ) -> None:
        """Set the state of a slot as `export` found it on another rank."""
        self.next_position[slot], self.drawn[slot] = position, drawn
        self.history[slot, : len(history)] = history
        self.set_last(slot, last)
        if not self.device_seen.shape[1]:
            return
        self.flush()
        if seen is not None:
            self.device_seen[slot] = upload(seen, self.device)
        if counts is not None:
            self.device_counts()[slot] = upload(counts, self.device)

    def position(self, slot: int) -> int | float:
        """Return the position of a slot's next token."""
        found: int | float = self.next_position[slot].item()
        return found

    def positions(self, slots: np.ndarray) -> np.ndarray:
        """Return the positions of these slots' next tokens, as the module gets them: int64 or float32 [n]."""
        found: np.ndarray = self.next_position[slots]
        return found.astype(np.float32) if self.position_dtype.is_floating_point else found

    def set_last(self, slot: int, value: int) -> None:
        """Make `value` the id that the next iteration reads."""
        self.last[slot] = value
        self._moved[slot] = value

    def see(self, slot: int, ids: np.ndarray) -> None:
        """Mark ids (int64 [n]) as seen for the repetition penalty."""
        self._met.setdefault(slot, []).append(ids)

    def begin_loop(self, slot: int, key: int, iterations: int, stop_ids: Sequence[int]) -> None:
        """Prepare a slot for a resident loop."""
        # One entry always stays NO_ID: a sequence whose draw failed stops like any other.
        if len(stop_ids) >= self.stop_ids.shape[1]:
            self._widen(len(stop_ids) + 1)
        self.key[slot] = key
        self.left[slot] = iterations
        self.stop_ids[slot] = NO_ID
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
        self._armed[slot] = None

    def flush(self) -> None:
        """Copy what has changed since the last call to the device. Called before a step reads it."""
        if self._moved or self._armed or self._blank or self._met:
            changes = self._take_changes()
            if self.on_changes is not None:
                self.on_changes(changes)
            self.apply(changes)

    def apply(self, changes: SlotChanges) -> None:
        """Copy changes to the device."""
        if changes.moved is not None:
            facts = upload(changes.moved, self.device)
            self.device_last.index_copy_(0, facts[0], facts[1])
        if changes.armed is not None:
            width = changes.armed.shape[1] - 1
            if width > self.device_stop_ids.shape[1]:  # on a follower: the leader's arrays are wider already
                self._widen(width)
            self.stop_ids[changes.armed[:, 0]] = changes.armed[:, 1:]
            facts = upload(changes.armed, self.device)
            self.device_stop_ids.index_copy_(0, facts[:, 0], facts[:, 1:])
            self.device_stopped.index_fill_(0, facts[:, 0], False)
        if changes.blank is not None:
            blank = upload(changes.blank, self.device)
            self.device_seen.index_fill_(0, blank, False)
            if self._counts is not None:
                self._counts.index_fill_(0, blank, 0)
        if changes.met is not None:
            self.device_seen.view(-1).index_fill_(0, upload(changes.met, self.device), True)

    def _take_changes(self) -> SlotChanges:
        moved = np.array([*self._moved.items()], dtype=np.int64).T.copy() if self._moved else None
        rows = np.array([*self._armed], dtype=np.int64)
        armed = np.concatenate([rows[:, None], self.stop_ids[rows]], axis=1) if self._armed else None
        blank = np.array([*self._blank], dtype=np.int64) if self._blank else None
        width = self.device_seen.shape[1]
        parts = [slot * width + ids for slot, found in self._met.items() for ids in found]
        met = np.concatenate(parts) if self._met else None
        for pending in (self._moved, self._armed, self._blank, self._met):
            pending.clear()
        return SlotChanges(moved=moved, armed=armed, blank=blank, met=met)

    def _clear(self, slot: int) -> None:
        self.last[slot] = self.key[slot] = NO_ID
        self.left[slot] = self.next_position[slot] = self.drawn[slot] = 0
        # The last id on the device is written by a draw or by `set_last` before a step reads it.
        self._moved.pop(slot, None)
        if self.device_seen.shape[1]:
            self._blank[slot] = None
        self._met.pop(slot, None)

    def _widen(self, width: int) -> None:
        wider = np.full((self.count + 1, width), NO_ID, dtype=np.int64)
        wider[:, : self.stop_ids.shape[1]] = self.stop_ids
        self.stop_ids = wider
        self.device_stop_ids = upload(wider.copy(), self.device)
