"""Event loop that busy-polls for a short time before it sleeps, while requests arrive. Created by `main.run`."""

from __future__ import annotations

import asyncio
import selectors
import time

from mstar_core.transport import Spin


class BusyPollSelector(selectors.EpollSelector):
    """Polls the kernel without blocking until the spin window expires, then blocks."""

    def __init__(self, spin: Spin) -> None:
        super().__init__()
        self._spin = spin

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return ready descriptors. timeout: seconds until the next timer of the loop; None: there is none."""
        left_s = self._spin.left_s
        if not left_s or (timeout is not None and timeout <= 0):
            return super().select(timeout)
        look, begun = super().select, time.monotonic()
        end = begun + (left_s if timeout is None else min(left_s, timeout))
        while (now := time.monotonic()) < end:
            if found := look(0):
                return found
        return look(None if timeout is None else max(0.0, timeout - (now - begun)))


def busy_poll_loop(spin: Spin) -> asyncio.AbstractEventLoop:
    """Return a new event loop that busy-polls until the spin window expires."""
    return asyncio.SelectorEventLoop(BusyPollSelector(spin))
