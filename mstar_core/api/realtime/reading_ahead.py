"""Reads the beginning of the next prompt while the user speaks, so that the end of speech leaves little to do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from mstar_core.api.errors import reply_of
from mstar_core.api.exchange import Exchange
from mstar_core.api.realtime.calls import answer_call, window_s
from mstar_core.api.realtime.items import Entry
from mstar_core.api.realtime.settings import RealtimeSettings
from mstar_core.errors import MstarError

log = logging.getLogger("mstar.api.realtime")

MARGIN_S: Final = 0.05
"""Sound that is sent behind the last completed window, because its last values may read a little beyond it."""

Known = Callable[[float | None], Sequence[Entry]]
"""Returns the items of the next prompt as far as they are known. Its argument: seconds of the new sound, None for none.
"""


class ReadingAhead:
    """One request at a time, without output, which leaves cached pages under the lease of the session.

    It reads the items before the turn as soon as the turn begins, and the completed windows of its sound (see
    `Audio.window_s`). Owned by the conversation. next_turn: returns the exchange of a request.
    """

    def __init__(self, exchange: Exchange, session_id: str, next_turn: Callable[[], Exchange]) -> None:
        self._service = exchange.service
        self._session_id = session_id
        self._next_turn = next_turn
        self._window_s = window_s(exchange.service.model)
        self._windows = -1  # windows that are read, or being read; -1: not even the items before the sound
        self._task: asyncio.Task[None] | None = None

    def heard(self, seconds: float, settings: RealtimeSettings, known: Known) -> None:
        """Read what is complete of a turn with so much sound so far, unless other requests need the places.

        The model may read no windows; then nothing is read ahead.
        """
        if not self._window_s or (self._task is not None and not self._task.done()):
            return
        windows = max(0, int((seconds - MARGIN_S) / self._window_s))
        if windows <= self._windows or not self._service.admission.is_free:
            return
        self._windows = windows
        entries = known(windows * self._window_s + MARGIN_S if windows else None)
        if entries or settings.instructions:
            self._task = asyncio.create_task(self._read(settings, entries), name=f"ahead of {self._session_id}")

    def stop(self) -> None:
        """Cancel the request, and begin again with the next sound: the turn is over, or the items have changed."""
        self._windows = -1
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Cancel the request, and wait for its end."""
        self.stop()
        task, self._task = self._task, None
        if task is not None:
            await asyncio.wait({task})

    async def _read(self, settings: RealtimeSettings, entries: Sequence[Entry]) -> None:
        turn = self._next_turn()
        service, code, status = turn.service, "ok", 200
        try:
            call = replace(await answer_call(turn, settings, entries, self._session_id), reads_only=True)
            async with service.open(
                call, key=turn.key, scope=turn.scope, started=turn.started, adapter=turn.adapter
            ) as session:
                async for _ in session.chunks():
                    pass
        except asyncio.CancelledError:
            code, status = "cancelled", 499
            raise
        except Exception as error:
            reply = reply_of(error, turn.request_id)
            code, status = reply.code, reply.status
            if not isinstance(error, MstarError):
                log.error("reading ahead failed", exc_info=error)
        finally:
            turn.note(turn.request_id, code, status, service.clock() - turn.started, is_work=False)
