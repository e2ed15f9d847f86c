"""Lines of stdin, awaited. Used by `mstarctl talk`, whose loop handles events in the meantime."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import BinaryIO


async def typed_lines() -> AsyncIterator[str]:
    """Yield the lines of stdin without their ends, until it ends. Empty lines are left out."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str | None] = asyncio.Queue()

    def put(line: str | None) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lines.put_nowait, line)

    def read() -> None:
        for data in _unbuffered():
            put(data.decode("utf-8", "replace").strip())
        put(None)

    # A terminal's read cannot be cancelled. The thread holds no lock of `sys.stdin`, so the process can end meanwhile.
    threading.Thread(target=read, name="stdin", daemon=True).start()
    while (line := await lines.get()) is not None:
        if line:
            yield line


def _unbuffered() -> BinaryIO:
    return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
