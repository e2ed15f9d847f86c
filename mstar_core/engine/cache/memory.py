"""Memory of one KV node: page pool, page tables, slots and prefix cache. Made by the KV engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mstar_core.engine.base import Handle, MemoryUse

if TYPE_CHECKING:
    from mstar_core.engine.cache.feeds import Feeds
    from mstar_core.engine.cache.loop_rows import LoopRows
    from mstar_core.engine.cache.page_pool import PagePool
    from mstar_core.engine.cache.page_table import PageTables
    from mstar_core.engine.cache.prefix_cache import PrefixCache
    from mstar_core.engine.cache.slots import Slots


@dataclass(slots=True)
class KVMemory:
    """Pages and slots of one node, and how often requests were preempted. Owned by its KV engine.

    rows: values per sequence of its resident loop, None if that carries only ids.
    """

    pool: PagePool
    tables: PageTables
    slots: Slots
    prefixes: PrefixCache | None
    rows: LoopRows | None = None
    preempted: int = 0
    preempted_pages: int = 0
    last_preempted: Handle | None = None

    @property
    def feeds(self) -> Feeds | None:
        """Stream items of its resident loop, None without a stream."""
        return self.rows.feeds if self.rows is not None else None

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
        return MemoryUse(
            pages_total=self.pool.total,
            pages_used=self.pool.used,
            pages_cached=self.pool.cached,
            slots_total=self.slots.count,
            slots_used=self.slots.used,
            preempted=self.preempted,
            preempted_pages=self.preempted_pages,
            last_preempted=self.last_preempted,
        )
