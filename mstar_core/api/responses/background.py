"""Responses that are generated without their clients, which poll them or come back to their events.

A run belongs to the service. It keeps its events for a while, and stores its response when it begins and when it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace
from typing import Final

import msgspec

from mstar_core.api.errors import reply_of
from mstar_core.api.output.kept_events import EVENTS, EventLog
from mstar_core.api.requests.background import BackgroundRun
from mstar_core.api.requests.response_store import StoredResponse
from mstar_core.api.responses.answer import ResponseAnswer, encoded
from mstar_core.api.responses.schema import ResponseError, ResponseEvent, ResponseObject
from mstar_core.api.service import Service
from mstar_core.errors import Cancelled, MstarError

RUNNING: Final = ("queued", "in_progress")
LOST: Final = ResponseError(
    code="server_error",
    message="the response was lost: the api was restarted before its end, or could not store it",
)

Generate = Callable[[], AsyncGenerator[list[ResponseEvent]]]

log = logging.getLogger("mstar.api.responses")


async def start(
    service: Service, answer: ResponseAnswer, entry: StoredResponse, key: str, request_id: str, generate: Generate
) -> BackgroundRun:
    """Begin to generate a response. generate: yields its events. Raises Unavailable if it cannot be stored."""
    run = BackgroundRun(response=answer.response, entry=entry, key=key, request_id=request_id, events=EventLog())
    await service.responses.save(entry)
    service.kept_events.open(entry.id, key, run.events, EVENTS)
    _add(run, answer.begin())
    service.background.add(run)
    run.task = asyncio.create_task(_run(service, run, answer, generate))
    return run


async def _run(service: Service, run: BackgroundRun, answer: ResponseAnswer, generate: Generate) -> None:
    last: list[ResponseEvent] = []
    try:
        async with aclosing(generate()) as generated:
            async for events in generated:
                last = events
                if answer.response.status in RUNNING:  # otherwise these tell of the end, which is stored first
                    _add(run, last)
                    last = []
    except asyncio.CancelledError:
        last = answer.fail(reply_of(Cancelled("the response was cancelled"), run.request_id))
    except Exception as error:  # isolation boundary: one response, which ends as `failed` with the error
        if not isinstance(error, MstarError):
            log.exception("a response in the background failed")
        last = answer.fail(reply_of(error, run.request_id))
    try:
        await _store(service, run, answer.response)
    finally:
        service.background.remove(run)
        service.held.give(run.held_bytes)
        _add(run, last)
        run.events.end()


async def _store(service: Service, run: BackgroundRun, response: ResponseObject) -> None:
    if run.is_deleted:
        await service.responses.delete(run.entry.id, run.entry.owner)
        return
    try:
        await service.responses.save(finished(run.entry, response))
    except MstarError as error:
        log.error("a response in the background was not stored", extra={"facts": {"why": str(error)}})


def _add(run: BackgroundRun, events: Iterable[ResponseEvent]) -> None:
    run.events.add(encoded(event) for event in events)


def finished(entry: StoredResponse, response: ResponseObject) -> StoredResponse:
    """Return the entry of a response that has changed."""
    return replace(entry, status=response.status, body=msgspec.json.encode(response))


async def settled(service: Service, entry: StoredResponse) -> StoredResponse:
    """Return an entry, as failed if an earlier api was generating it."""
    if entry.status not in RUNNING:
        return entry
    response = msgspec.json.decode(entry.body, type=ResponseObject)
    response.status, response.error = "failed", LOST
    entry = finished(entry, response)
    await service.responses.save(entry)
    return entry
