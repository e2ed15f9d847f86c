"""Watch of a deployment's state through its admin socket, kept in a `Store`. Used by `requests --watch`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from mstar_core.errors import TransportError, Unreachable
from mstar_core.observe.frames import HelloFrame
from mstarctl.client.admin import AdminClient, check_api
from mstarctl.client.store import Store, decode

AGAIN_S: Final = 0.5
"""Pause before a watch is opened again."""

STALE_S: Final = 6.0


def watched(admin: AdminClient, parts: Sequence[str], *, filter_text: str = "", hz: float = 1.0) -> Iterator[Store]:
    """Yield the state after every frame, each time in the same store. A watch that lost frames is opened again.

    Raises Unreachable after three missed heartbeats, UsageError for an invalid filter or unsupported version.
    """
    store = Store()
    arguments: dict[str, Any] = {"hz": hz, "parts": ",".join(parts)}
    if filter_text:
        arguments["filter"] = filter_text
    last = time.monotonic()
    while True:
        try:
            for line in admin.raw_lines("/v1/watch", **arguments):
                frame = decode(line) if line.strip() else None
                if frame is None:
                    continue
                if isinstance(frame, HelloFrame):
                    check_api(admin.name, frame.api, frame.min_api)
                store.apply(frame)
                last = time.monotonic()
                if store.has_gap:
                    break
                if store.is_synced:
                    yield store
        except (Unreachable, TransportError):
            if time.monotonic() - last > STALE_S:
                raise
        if not store.has_gap:
            time.sleep(AGAIN_S)
