"""POST /v1/responses: a text or items in, a response out, as JSON, as events, or in the background."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from sanic.response import HTTPResponse

from mstar_core.api.errors import ErrorReply
from mstar_core.api.exchange import PING, Exchange, streaming
from mstar_core.api.group import Group, GroupPart, open_group
from mstar_core.api.output.kept_events import EVENTS, Event
from mstar_core.api.parse.constraint import read_text_form
from mstar_core.api.parse.logprobs import chat_logprobs, with_logprobs
from mstar_core.api.parse.params import ParsedRequest
from mstar_core.api.parse.tools import ChatOptions, read_effort, read_tools
from mstar_core.api.requests.response_store import StoredResponse, owner_of
from mstar_core.api.responses.answer import ResponseAnswer, encoded, refused
from mstar_core.api.responses.background import RUNNING, finished, start
from mstar_core.api.responses.items import numbered, with_types
from mstar_core.api.responses.options import (
    LOGPROBS,
    chat_place,
    check_options,
    check_raw,
    choice_of,
    form_of,
    tools_of,
)
from mstar_core.api.responses.schema import (
    Item,
    ReasoningEcho,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
    TextEcho,
)
from mstar_core.api.responses.stored import conversation_items
from mstar_core.api.responses.turns import chat_form
from mstar_core.api.routes.chat import chat_call
from mstar_core.api.routes.fields import answered_name, check_name, openai_parsed, read_body
from mstar_core.api.routes.request_state import follow
from mstar_core.api.schema import PlainTextFormat
from mstar_core.api.service import Service
from mstar_core.api.text.answers import AnswerReader, answer_readers
from mstar_core.errors import MstarError, RequestError

ID_BYTES: Final = 20
OUTPUTS: Final = ("text",)
CONTINUED: Final = ("completed", "incomplete")
"""States of responses that others can continue."""

log = logging.getLogger("mstar.api.responses")


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """A response that is about to be generated. entry: what is stored of it, None if it is not stored."""

    call: ParsedRequest
    answer: ResponseAnswer
    reader: AnswerReader
    entry: StoredResponse | None

    def events(self, piece: GroupPart) -> list[ResponseEvent]:
        """Return the events of a part of the answer."""
        return self.answer.of(self.reader, piece)


async def create(exchange: Exchange) -> HTTPResponse | None:
    """Handle one request. Returns the whole response, or None if it was streamed."""
    # For a stream that another process has begun, and whose request is refused here.
    exchange.on_failed = lambda reply: [refused(reply, exchange.events.count)]
    body, rest = await read_body(exchange, ResponsesRequest, _prepared)
    rest = check_options(body, rest)
    is_stored = _is_stored(exchange.service, body)
    if body.background:
        return await _in_background(exchange, body, await _created(exchange, body, rest, is_stored=True))
    created = await _created(exchange, body, rest, is_stored=is_stored)
    exchange.keep_events(EVENTS if body.stream else None)
    async with open_group(exchange, created.call, 1) as group:
        if not body.stream:
            return await _whole(exchange, group, created)
        await _stream(exchange, group, created)
    return None


def _prepared(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    check_raw(fields)
    return with_types(fields)


def _is_stored(service: Service, body: ResponsesRequest) -> bool:
    is_on = service.responses.is_on
    if body.store and not is_on:
        raise RequestError(
            "the server stores no responses", hint="send store: false", field="store", code="unsupported_parameter"
        )
    is_stored = is_on if body.store is None else body.store
    if body.background and not is_stored:
        raise RequestError(
            "background needs a response that is stored",
            hint="omit store" if is_on else "omit background; the server stores no responses",
            field="background",
            code="unsupported_parameter",
        )
    return is_stored


async def _created(exchange: Exchange, body: ResponsesRequest, rest: dict[str, Any], *, is_stored: bool) -> Created:
    """Return a response that can be generated. Raises RequestError and errors of its conversation and media."""
    stem = hashlib.blake2b(
        f"{exchange.request_id}/{exchange.created}/{exchange.key}".encode(), digest_size=ID_BYTES
    ).hexdigest()
    items = numbered(body.input, stem)
    if not items:
        raise RequestError("input is missing", hint="send a text or items", field="input", code="missing_field")
    earlier = await _earlier(exchange, body.previous_response_id)
    call = await _call(exchange, body, rest, earlier, items)
    response = _response(exchange, body, call, f"resp_{stem}", is_stored=is_stored)
    entry = StoredResponse(
        id=response.id,
        owner=owner_of(exchange.key),
        previous=body.previous_response_id or "",
        status=response.status,
        created=exchange.created,
        body=msgspec.json.encode(response),
        items=msgspec.json.encode(items),
    )
    (reader,) = answer_readers(exchange, call, 1)
    return Created(
        call=call,
        answer=ResponseAnswer(response, has_logprobs=LOGPROBS in (body.include or ())),
        reader=reader,
        entry=entry if is_stored else None,
    )


async def _earlier(exchange: Exchange, response_id: str | None) -> list[Item]:
    """Return the items of the conversation that a response continues."""
    if response_id is None:
        return []
    entries = await exchange.service.responses.conversation(response_id, owner_of(exchange.key))
    if not entries:
        raise RequestError(
            f"there is no response {response_id[:80]!r}",
            hint="responses are stored for a while, unless their request has store: false",
            field="previous_response_id",
            code="previous_response_not_found",
        )
    status = entries[-1].status
    if status not in CONTINUED:
        raise RequestError(
            f"the response {response_id[:80]!r} is {status.replace('_', ' ')}",
            hint="wait for its end" if status in RUNNING else "continue an earlier one",
            field="previous_response_id",
        )
    return conversation_items(entries)


async def _call(
    exchange: Exchange, body: ResponsesRequest, rest: dict[str, Any], earlier: Sequence[Item], items: Sequence[Item]
) -> ParsedRequest:
    """Return the request as chats have it. Errors name the fields of responses."""
    form = chat_form(body.instructions, earlier, items, is_text=isinstance(body.input, str))
    try:
        options = _options(exchange, body)
        asked = read_text_form(exchange.service.model, form_of(body), OUTPUTS, options)
        params = openai_parsed(exchange, rest, OUTPUTS, route="chat")
        count = chat_logprobs(exchange.service.model, body.top_logprobs, is_wanted=LOGPROBS in (body.include or ()))
        params = replace(params, params=with_logprobs(params.params, count))
        return await chat_call(exchange, form.messages, OUTPUTS, options, params, asked)
    except RequestError as error:
        error.title, error.hint = (chat_place(form.place(text)) for text in (error.title, error.hint))
        if error.field is not None:
            error.facts["field"] = chat_place(form.place(error.field))
        raise


def _options(exchange: Exchange, body: ResponsesRequest) -> ChatOptions:
    check_name(exchange, body.model)
    spec, choice = exchange.service.model, choice_of(body)
    tools = read_tools(spec, tools_of(body), choice, OUTPUTS, exchange.limits.max_text_bytes)
    effort = body.reasoning.effort if body.reasoning is not None else None
    template, begins_open = read_effort(spec, effort, "reasoning.effort")
    thinks = effort != "none"
    return ChatOptions(tools=tools, choice=choice, template=template, begins_open=begins_open, thinks=thinks)


def _response(
    exchange: Exchange, body: ResponsesRequest, call: ParsedRequest, response_id: str, *, is_stored: bool
) -> ResponseObject:
    text, reasoning = body.text, body.reasoning
    return ResponseObject(
        id=response_id,
        created_at=int(exchange.created),
        model=answered_name(exchange, body.model),
        status="queued" if body.background else "in_progress",
        background=body.background,
        instructions=body.instructions,
        max_output_tokens=getattr(call.params, "max_output_tokens", None),
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=body.previous_response_id,
        reasoning=ReasoningEcho(effort=reasoning.effort if reasoning is not None else None),
        store=is_stored,
        temperature=getattr(call.params, "temperature", None),
        text=TextEcho(format=(text.format if text is not None else None) or PlainTextFormat()),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=getattr(call.params, "top_p", None),
    )


async def _whole(exchange: Exchange, group: Group, created: Created) -> HTTPResponse:
    created.answer.begin()
    events: list[ResponseEvent] = []
    async for piece in group.pieces():
        events = created.events(piece) if piece is not None else events
    warnings = await _kept(exchange, created, events)
    exchange.warn([*group.warnings, *warnings])
    return exchange.json(created.answer.response)


async def _stream(exchange: Exchange, group: Group, created: Created) -> None:
    answer = created.answer
    first = [*answer.begin(), *answer.run()]

    def failed(reply: ErrorReply) -> list[Event]:
        begun = exchange.events.count  # maybe sent by another process
        if begun:
            answer.number = begun
        return [encoded(each) for each in (*(() if begun else first), *answer.fail(reply))]

    exchange.on_failed = failed
    async with streaming(exchange):
        async for piece in group.pieces():
            exchange.warn(group.warnings)
            if piece is None:
                await exchange.keep_alive(PING, EVENTS, group.left_s)
                continue
            answer.number = exchange.events.count + len(first)
            events = [*first, *created.events(piece)]
            first = []
            if piece.done is not None:
                await _kept(exchange, created, events)
            await exchange.send([encoded(each) for each in events], EVENTS, group.left_s, is_last=group.is_done)


async def _kept(exchange: Exchange, created: Created, events: Sequence[ResponseEvent]) -> tuple[str, ...]:
    """Store a finished response. Returns a warning if it could not be; the last event says so too."""
    entry, response = created.entry, created.answer.response
    if entry is None:
        return ()
    why = "the response is too large to be stored"
    try:
        if await exchange.service.responses.save(finished(entry, response)):
            return ()
    except MstarError as error:
        why = "the response could not be stored"
        log.error("a response was not stored", extra={"facts": {"why": str(error)}})
    response.store = False
    last = events[-1].response
    if isinstance(last, ResponseObject):
        last.store = False
    return (why,)


async def _in_background(exchange: Exchange, body: ResponsesRequest, created: Created) -> HTTPResponse | None:
    service, key, entry, call = exchange.service, exchange.key, created.entry, created.call
    assert entry is not None
    if not body.stream:
        exchange.keep_events(None)
    started, scope, adapter = exchange.started, exchange.scope, exchange.adapter

    async def generate() -> AsyncGenerator[list[ResponseEvent]]:
        async with service.open(call, key=key, scope=scope, started=started, adapter=adapter) as session:
            yield created.answer.run()
            async for chunks in session.chunks():
                yield created.events(GroupPart(index=0, chunks=chunks))
            done = session.done()
        yield created.events(GroupPart(index=0, done=done))

    run = await start(service, created.answer, entry, key, exchange.request_id, generate)
    run.held_bytes, exchange.held_bytes = exchange.held_bytes, 0
    exchange.warn(call.warnings)
    if not body.stream:
        return exchange.json(run.response)
    await follow(exchange, run.events, 0)
    return None
