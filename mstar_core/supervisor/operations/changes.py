"""Wake-up of operations that wait for a state of the deployment. Owned by the supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """Wakes all waiting operations when the state of a process, of a cordon or of the deployment has changed."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Make waiting operations check their condition again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, is_true: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait until a condition is true, at most `limit_s` (None: no limit). Returns whether it is."""
        try:
            async with asyncio.timeout(limit_s):
                while not is_true():
                    await self._changed.wait()
        except TimeoutError:
            return is_true()
        return True
