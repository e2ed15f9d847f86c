"""Progress of a load for streaming requests that wait for it: comments in their stream of server-sent events."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from mstar_core.gateway.parts import LoadProgress

FIRST_S: Final = 1.0
"""Wait after which the stream begins with a comment. A status of an error is no longer possible then."""

REPEAT_S: Final = 2.0


@dataclass(slots=True)
class Comments:
    """Comments in the stream of one request. Owned by the door's handler, which ends them by `stop`.

    answer: the stream once it has begun. first_s, repeat_s: seconds until the first comment and between two.
    """

    request: web.BaseRequest
    headers: dict[str, str]
    is_possible: bool
    first_s: float = FIRST_S
    repeat_s: float = REPEAT_S
    answer: web.StreamResponse | None = None
    _latest: LoadProgress | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _timer: asyncio.TimerHandle | None = None
    _task: asyncio.Task[None] | None = None

    def note(self, progress: LoadProgress) -> None:
        """Take over what the request waits for. The first call starts the wait for the first comment."""
        self._latest = progress
        self._news.set()
        if self.is_possible and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.first_s, self._begin)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._write(), name="load comments")

    async def _write(self) -> None:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store", "Server": "mstar"}
        answer = web.StreamResponse(headers={**headers, **self.headers})
        await answer.prepare(self.request)
        self.answer = answer
        while True:
            self._news.clear()
            if self._latest is not None:
                await answer.write(comment(self._latest))
            await asyncio.sleep(self.repeat_s)
            await self._news.wait()

    async def stop(self) -> web.StreamResponse | None:
        """End the comments; return the stream if it has begun."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                await self._task
        return self.answer


def comment(progress: LoadProgress) -> bytes:
    """Return a comment such as `: loading 40 % weights`."""
    share = "" if progress.share is None else f" {100 * progress.share:.0f} %"
    text = " ".join(progress.text.split())
    return f": {progress.state}{share} {text}".rstrip().encode() + b"\n\n"
