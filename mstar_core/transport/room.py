"""Room for tensors in the arena of a process with an event loop: commits memory in a thread, and waits for readers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mstar_core.errors import ArenaFull
from mstar_core.transport.arena import Arena, Growth


class Room:
    """Room in one arena. Owned by the link of the api, which reports each end of a loan with `freed`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._changed = asyncio.Event()
        self._growing = 0

    def has(self, sizes: Sequence[int]) -> bool:
        """Return whether tensors of these sizes, in bytes, can be lent at once."""
        return self._arena.has_room(sizes)

    async def wait(self, sizes: Sequence[int]) -> None:
        """Wait until tensors of these sizes can be lent. Raises ArenaFull if they can never be.

        They may have to wait again if others are lent before them.
        """
        while not self._arena.has_room(sizes):
            self._changed.clear()
            try:
                await self._grow(self._arena.claim_for(sizes))
            except ArenaFull as error:
                if self._arena.has_room(sizes):
                    return  # a loan has ended meanwhile
                if error.facts["needed"] > self._arena.max_bytes or not (self._arena.live or self._growing):
                    raise
                await self._changed.wait()

    def freed(self) -> None:
        """Wake those that wait, because a loan has ended."""
        self._changed.set()

    async def _grow(self, growth: Growth) -> None:
        """Commit memory in a thread. Raises ArenaFull if the system has none."""
        future = asyncio.get_running_loop().run_in_executor(None, growth.commit)
        self._growing += 1

        def settle(done: asyncio.Future[OSError | None]) -> None:
            self._growing -= 1
            self._arena.settle(growth)
            if growth.is_committed:
                self._changed.set()

        future.add_done_callback(settle)  # also if the caller has gone
        error = await asyncio.shield(future)
        if error is not None:
            raise self._arena.full(growth.size, f"the system has no memory: {error.strerror}")
