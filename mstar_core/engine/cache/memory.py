"""Memory of one KV node as its scheduler sees it: pages, slots, prefix cache, and pending changes of the device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mstar_core.engine.base import Handle, MemoryUse
from mstar_core.engine.steps.updates import (
    PageCopy,
    PagesArrived,
    PagesCleared,
    PagesCopied,
    PagesDropped,
    PagesRestored,
    PagesSaved,
    PenaltiesRestored,
    SlotCopied,
    Update,
)

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cache.feeds import Feeds
    from mstar_core.engine.cache.loop_values import LoopValues
    from mstar_core.engine.cache.page_pool import PagePool
    from mstar_core.engine.cache.page_table import PageTables
    from mstar_core.engine.cache.prefix_cache import PrefixCache
    from mstar_core.engine.cache.slots import Slots


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class SavedPages:
    """Copies of a sequence's pages outside the pools, in token order. They are dropped when nothing refers to this."""

    number: int


@dataclass(slots=True)
class KVMemory:
    """Pages and slots of one node, and how often requests were preempted. Owned by its scheduler.

    loop: values per sequence of its resident loop, None if that carries only ids; feeds: items of its stream, None
    without one. updates: changes of the device that precede the next step, in order.
    """

    pool: PagePool
    tables: PageTables
    slots: Slots
    prefixes: PrefixCache | None
    loop: LoopValues | None = None
    feeds: Feeds | None = field(init=False)
    preempted: int = 0
    preempted_pages: int = 0
    last_preempted: Handle | None = None
    _updates: list[Update] = field(default_factory=list)
    _saved: int = 0
    _dropped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.feeds = self.loop.feeds if self.loop is not None else None

    def pages_of(self, slots: Sequence[int]) -> int:
        """Return the pages that these slots hold, shared ones counted once per slot."""
        return int(self.tables.count[slots].sum())

    def note_preemption(self, handle: Handle, slots: Sequence[int]) -> None:
        """Count a request that is about to lose the pages of these slots."""
        self.preempted += 1
        self.preempted_pages += self.pages_of(slots)
        self.last_preempted = handle

    def use(self) -> MemoryUse:
        """See NodeRunner.memory."""
        if self.prefixes is not None:
            self.prefixes.leases.expire()
        return MemoryUse(
            pages_total=self.pool.total,
            pages_used=self.pool.used,
            pages_cached=self.pool.cached,
            pages_leased=self.pool.leased,
            slots_total=self.slots.count,
            slots_used=self.slots.used,
            preempted=self.preempted,
            preempted_pages=self.preempted_pages,
            last_preempted=self.last_preempted,
        )

    # -- changes of the device ---------------------------------------------------------------------------------------

    def ensure(self, slot: int, tokens: int) -> None:
        """Get pages for more tokens of a slot, see `PageTables.ensure`."""
        copies = self.tables.ensure(slot, tokens)
        if copies:
            self.copy_pages(copies)

    def copy_pages(self, copies: list[PageCopy]) -> None:
        """Copy pages before the next write."""
        self._clear_stale()
        self._updates.append(PagesCopied(copies))

    def save_pages(self, slot: int, tokens: int) -> SavedPages:
        """Copy the first tokens of a slot to the host. Its pages may be released at once."""
        saved = self._numbered()
        self._updates.append(PagesSaved(saved.number, self.pages(slot, tokens)))
        return saved

    def arrived_pages(self, groups: tuple[Tensor, ...]) -> SavedPages:
        """Keep pages that came from another rank as saved ones."""
        saved = self._numbered()
        self._updates.append(PagesArrived(saved.number, groups))
        return saved

    def restore_pages(self, saved: SavedPages, slot: int, tokens: int) -> None:
        """Write saved pages into those of a slot, whose first tokens they are."""
        self._clear_stale()  # or the next step would clear them
        self._updates.append(PagesRestored(saved.number, self.pages(slot, tokens)))
        self.tables.length[slot] = tokens

    def pages(self, slot: int, tokens: int) -> list[int]:
        """Return the pages of a slot's first tokens."""
        return self.tables.pages(slot)[: self.pool.pages_for(tokens)]

    def copy_slot(self, source: int, into: int) -> None:
        """Copy the state of slot `source` to slot `into`, as for a forked branch."""
        self.slots.copy(source, into)
        if self.slots.vocab:  # without a vocabulary, no step reads the device arrays
            self._take_slots()
            self._updates.append(SlotCopied(source, into))

    def restore_penalties(self, slot: int, seen: Tensor | None, counts: Tensor | None) -> None:
        """Set what penalties read of a slot whose cache came from another rank, see PenaltiesRestored."""
        if self.slots.vocab and not (seen is None and counts is None):
            self._take_slots()
            self._updates.append(PenaltiesRestored(slot, seen, counts))

    def begin_loop_values(self, slot: int, values: dict[str, Tensor]) -> None:
        """Set the values of a slot's resident loop, see `LoopValues.begin`."""
        assert self.loop is not None
        self._updates += self.loop.begin(slot, values)

    def set_loop_values(self, slot: int, values: dict[str, Tensor]) -> None:
        """Replace values of a slot's resident loop."""
        assert self.loop is not None
        self._updates += self.loop.set(slot, values)

    def take_updates(self) -> tuple[Update, ...]:
        """Return all changes since the last call, in order."""
        self._take_slots()
        if self.loop is not None:
            self._updates += self.loop.take_changes()
        self._clear_stale()
        if self._dropped:
            numbers = self._dropped[:]
            del self._dropped[: len(numbers)]
            self._updates.append(PagesDropped(numbers))
        if not self._updates:
            return ()
        updates = tuple(self._updates)
        self._updates.clear()
        return updates

    def _take_slots(self) -> None:
        changes = self.slots.take_changes()
        if changes is not None:
            self._updates.append(changes)

    def _clear_stale(self) -> None:
        """Clear pages that an earlier owner has written."""
        if self.pool.stale:
            self._updates.append(PagesCleared(self.pool.take_stale()))

    def _numbered(self) -> SavedPages:
        self._saved += 1
        saved = SavedPages(self._saved)
        weakref.finalize(saved, self._dropped.append, saved.number).atexit = False
        return saved
