"""The api's event loop, which looks for events a while before it sleeps, while requests come. Made by `main.run`."""

from __future__ import annotations

import asyncio
import selectors
import time

from mstar_core.transport import Spin


class BusyPollSelector(selectors.EpollSelector):
    """Asks the kernel again and again, without waiting, for as long as `spin` lasts; then waits for the rest."""

    def __init__(self, spin: Spin) -> None:
        super().__init__()
        self._spin = spin

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Events by descriptor. timeout: seconds until some timer of the loop is due, None: there is none."""
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
    """A new event loop that looks on while `spin` says so."""
    return asyncio.SelectorEventLoop(BusyPollSelector(spin))
