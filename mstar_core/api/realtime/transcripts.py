"""Transcripts of the user's sound, made by the model itself beside its answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from mstar_core.api.errors import ErrorReply, reply_of
from mstar_core.api.exchange import Exchange
from mstar_core.api.realtime.calls import transcript_call
from mstar_core.api.realtime.items import HeardPart
from mstar_core.api.realtime.reports import Reports
from mstar_core.api.realtime.settings import TranscriptRules
from mstar_core.errors import MstarError

log = logging.getLogger("mstar.api.realtime")


class Transcriber:
    """Runs one request for each sound. Owned by the conversation. next_turn: returns the exchange of a request."""

    def __init__(self, reports: Reports, next_turn: Callable[[], Exchange]) -> None:
        self._reports = reports
        self._next_turn = next_turn
        self._tasks: set[asyncio.Task[None]] = set()
        self._draft: asyncio.Task[None] | None = None
        self.draft: str | None = None  # of the turn up to its last pause

    def begin(self, item_id: str, place: int, part: HeardPart, rules: TranscriptRules) -> None:
        """Transcribe a part of an item."""
        self._start(self._whole(item_id, place, part, rules), f"transcript {item_id}")

    def begin_draft(self, part: HeardPart, rules: TranscriptRules) -> None:
        """Transcribe a turn that has come to a pause, in place of its earlier pauses."""
        self.drop_draft()
        self._draft = self._start(self._keep_draft(part, rules), "transcript of a turn")

    def drop_draft(self) -> None:
        """Forget the words of the turn."""
        self.draft = None
        if self._draft is not None:
            self._draft.cancel()
            self._draft = None

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel what runs, and wait for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _whole(self, item_id: str, place: int, part: HeardPart, rules: TranscriptRules) -> None:
        try:
            text = await self._text(part, rules, lambda delta: self._reports.transcript_grew(item_id, place, delta))
        except _TranscriptFailed as failed:
            self._reports.transcript_failed(item_id, place, failed.reply)
        else:
            part.transcript = text.strip()
            self._reports.transcript_done(item_id, place, part.transcript, len(part.samples) / part.rate)

    async def _keep_draft(self, part: HeardPart, rules: TranscriptRules) -> None:
        with suppress(_TranscriptFailed):  # logged; the silence alone decides then
            self.draft = await self._text(part, rules, lambda _: None)

    async def _text(self, part: HeardPart, rules: TranscriptRules, grow: Callable[[str], None]) -> str:
        """Return the transcript of a sound. Raises _TranscriptFailed."""
        turn = self._next_turn()
        service, text = turn.service, ""
        code, status = "ok", 200
        try:
            call = transcript_call(turn, rules, part)
            async with service.open(
                call, key=turn.key, scope=turn.scope, started=turn.started, adapter=turn.adapter
            ) as session:
                async for chunks in session.chunks():
                    delta = "".join(chunk.data.decode() for chunk in chunks if chunk.modality == "text")
                    text += delta
                    if delta:
                        grow(delta)
                session.done()
        except asyncio.CancelledError:
            code, status = "cancelled", 499
            raise
        except Exception as error:
            reply = reply_of(error, turn.request_id)
            if not isinstance(error, MstarError):
                log.error("a transcript failed", exc_info=error)
            service.count_refusal(reply, error)
            code, status = reply.code, reply.status
            raise _TranscriptFailed(reply) from error
        finally:
            turn.note(turn.request_id, code, status, service.clock() - turn.started)
        return text


class _TranscriptFailed(Exception):
    """A transcript that failed, with its error as clients see it."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.message)
        self.reply = reply
