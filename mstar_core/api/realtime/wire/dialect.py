"""Meaning of client events for a conversation. One object for each session."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mstar_core.api.errors import reply_of
from mstar_core.api.exchange import Exchange
from mstar_core.api.parse.media import decoded
from mstar_core.api.realtime.conversation import RealtimeConversation, ResponseOrder
from mstar_core.api.realtime.event_log import SentEvents
from mstar_core.api.realtime.history import History, new_id
from mstar_core.api.realtime.sound.voice_activity import SileroProbabilities
from mstar_core.api.realtime.wire.client_events import (
    BufferAppend,
    BufferClear,
    BufferCommit,
    ClientEvent,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    PlaybackClear,
    ResponseCancel,
    ResponseCreate,
    SessionUpdate,
    client_event,
    event_id_of,
    raw_event,
)
from mstar_core.api.realtime.wire.item_fields import entries_of, entry_of
from mstar_core.api.realtime.wire.server_events import ServerEvents
from mstar_core.api.realtime.wire.session_fields import SessionState, response_fields
from mstar_core.errors import MstarError

log = logging.getLogger("mstar.api.realtime")


class RealtimeDialect:
    """A session in the words of OpenAI's Realtime API. facts: of the session that never change, such as its id."""

    def __init__(
        self, exchange: Exchange, sent: SentEvents, facts: Mapping[str, Any], patch: Mapping[str, Any]
    ) -> None:
        """patch: fields of the session that the client secret sets. Raises RequestError."""
        self._exchange = exchange
        self._state = SessionState(exchange)
        self._state.update(patch)
        self._facts = facts
        history = History()
        self._events = ServerEvents(sent, new_id("conv"), history, self._shown, self._limits)
        self.conversation = RealtimeConversation(
            exchange, facts["id"], self._state.settings, history, self._events, SileroProbabilities, sent.has_room
        )
        self._events.session_created()

    async def handle(self, message: bytes | str) -> None:
        """Carry out one event. Its errors become an event and disturb nothing else."""
        event_id = None
        try:
            raw = raw_event(message)
            event_id = event_id_of(raw)
            await self._handle(client_event(raw))
        except Exception as error:
            if not isinstance(error, MstarError):
                log.exception("an event failed")
            self._events.failed(reply_of(error, self._exchange.request_id), event_id)

    def end(self, error: MstarError) -> None:
        """Say why the session ends."""
        self._events.failed(reply_of(error, self._exchange.request_id), None)

    async def _handle(self, event: ClientEvent) -> None:
        conversation = self.conversation
        match event:
            case BufferAppend():
                await conversation.hear(await decoded("audio", event.audio))
            case BufferCommit():
                await conversation.commit()
            case BufferClear():
                conversation.clear()
            case SessionUpdate():
                conversation.update(self._state.update(event.session))
            case ItemCreate():
                conversation.create(await entry_of(event.item, conversation, "item"), event.previous_item_id)
            case ItemRetrieve():
                conversation.retrieve(event.item_id)
            case ItemTruncate():
                conversation.truncate(event.item_id, event.content_index, event.audio_end_ms)
            case ItemDelete():
                conversation.delete(event.item_id)
            case ResponseCreate():
                conversation.respond(await self._order(event.response or {}))
            case ResponseCancel():
                conversation.stop(event.response_id)
            case PlaybackClear():
                conversation.clear_playback()
            case _:
                raise AssertionError(event)

    async def _order(self, sent: Mapping[str, Any]) -> ResponseOrder:
        fields, rest = response_fields(sent)
        return ResponseOrder(
            settings=self._state.for_response(fields, rest),
            entries=None if fields.input is None else await entries_of(fields.input, self.conversation),
            is_apart=fields.conversation == "none",
            metadata=fields.metadata,
        )

    def _shown(self) -> dict[str, Any]:
        shown = self._state.shown
        return {**shown, "model": shown.get("model") or self._exchange.served_name, **self._facts}

    def _limits(self) -> tuple[int, int]:
        admission = self._exchange.service.admission
        places = admission.max_concurrent_requests + admission.max_queue
        return max(0, places - admission.running - admission.waiting), places
