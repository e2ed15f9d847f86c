"""POST /v1/chat/completions: messages in, one or several answers out, as JSON or server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sanic.response import HTTPResponse

from mstar_core.api.exchange import PING, Exchange, streaming
from mstar_core.api.group import Group, open_group
from mstar_core.api.output.audio import CHAT_FORMATS, audio_format
from mstar_core.api.output.kept_events import EVENTS
from mstar_core.api.parse.constraint import TextForm, constraint_of, output_limit, read_text_form
from mstar_core.api.parse.logprobs import chat_logprobs, with_logprobs
from mstar_core.api.parse.messages import read_messages
from mstar_core.api.parse.params import ParsedRequest, RequestParams, check_outputs, constrained
from mstar_core.api.parse.tools import ChatOptions, SentTool, read_effort, read_tools
from mstar_core.api.routes.chat_answer import ChatAnswer, ChatEvents, ChatFrame, whole_chat
from mstar_core.api.routes.fields import (
    answered_name,
    check_count,
    check_name,
    check_session,
    openai_parsed,
    read_body,
    voice_of,
)
from mstar_core.api.schema import ChatMessage, ChatRequest, NamedToolChoice
from mstar_core.api.text.answers import AnswerReader, answer_readers
from mstar_core.errors import RequestError, TimedOut
from mstar_core.plugin.chat.turns import ToolChoice
from mstar_core.plugin.spec import ModelSpec
from mstar_core.sound_files import AudioFormat

STREAMED = "pcm16"


async def chat(exchange: Exchange) -> HTTPResponse | None:
    """Handle one request. Returns the whole response, or None if it was streamed."""
    body, rest = await read_body(exchange, ChatRequest)
    count = check_count(exchange, body.n)
    call = replace(await _call(exchange, body, rest), is_heard=bool(body.stream))
    form = _format(body, call.outputs)
    model = answered_name(exchange, body.model)
    frame = ChatFrame(request_id=exchange.request_id, created=int(exchange.created), model=model, seed=call.seed)
    exchange.keep_events(EVENTS if body.stream else None)
    readers = answer_readers(exchange, call, count)
    async with open_group(exchange, call, count) as group:
        if not body.stream:
            return await _whole(exchange, group, frame, form, readers)
        is_counted = body.stream_options is not None and body.stream_options.include_usage
        await _stream(exchange, group, ChatEvents(frame, readers, is_counted=is_counted))
    return None


async def _call(exchange: Exchange, body: ChatRequest, rest: dict[str, Any]) -> ParsedRequest:
    spec = exchange.service.model
    check_name(exchange, body.model)
    outputs = _outputs(spec, body)
    options = _options(spec, body, outputs, exchange.limits.max_text_bytes)
    asked = read_text_form(spec, body, outputs, options)
    voice = voice_of(spec, body.audio.voice, "audio.voice") if body.audio is not None else None
    params = openai_parsed(exchange, rest, outputs, {"voice": voice} if voice is not None else None)
    count = chat_logprobs(spec, body.top_logprobs, is_wanted=body.logprobs)
    params = replace(params, params=with_logprobs(params.params, count))
    session = check_session(body.session_id)
    call = await chat_call(exchange, body.messages, outputs, options, params, asked)
    return replace(call, session=session)


async def chat_call(
    exchange: Exchange,
    messages: Sequence[ChatMessage],
    outputs: tuple[str, ...],
    options: ChatOptions,
    params: RequestParams,
    asked: TextForm | None,
    *,
    most_files: int | None = None,
    files: Mapping[str, bytes] | None = None,
) -> ParsedRequest:
    """Read a conversation and its media, and make the grammar that its options or its form need.

    Returns the whole request. asked: the form of its text, None for any text. most_files, files: see
    `read_messages`.

    Raises as `read_messages` and `constraint_of`, and TimedOut.
    """
    service = exchange.service
    try:
        async with asyncio.timeout(max(0.0, exchange.started + params.timeout_s - service.clock())):
            limit = output_limit(params.params)
            constraint = await constraint_of(service.model, options, asked, service.grammars, limit)
            if constraint is not None:
                options = replace(options, constraint=constraint)
                params = replace(params, params=constrained(params.params, constraint))
            read = await read_messages(
                messages, service.model, exchange.limits, service.fetcher, most_files=most_files, files=files
            )
    except TimeoutError as error:
        raise TimedOut(
            f"the request did not finish within {params.timeout_s:g} s", hint="increase timeout_s"
        ) from error
    call = params.request(
        exchange.request_id, exchange.route, text=read.text, media=read.media, order=read.order, outputs=outputs
    )
    return replace(call, texts=tuple(read.texts), turns=tuple(read.turns), chat=options)


def _options(spec: ModelSpec, body: ChatRequest, outputs: Sequence[str], max_bytes: int) -> ChatOptions:
    """Return the tools, the choice among them and the thinking of a request. Raises RequestError, TooLarge."""
    sent = [
        SentTool(
            place=f"tools[{number}].function",
            name=tool.function.name,
            description=tool.function.description,
            parameters=tool.function.parameters,
            strict=tool.function.strict,
        )
        for number, tool in enumerate(body.tools or ())
    ]
    parallel = body.parallel_tool_calls
    match body.tool_choice:
        case NamedToolChoice(function=function):
            choice = ToolChoice(mode="named", name=function.name, parallel=parallel)
        case mode:
            choice = ToolChoice(mode=mode or "auto", parallel=parallel)
    tools = read_tools(spec, sent, choice, outputs, max_bytes)
    template, begins_open = read_effort(spec, body.reasoning_effort, "reasoning_effort")
    thinks = body.reasoning_effort != "none"
    return ChatOptions(tools=tools, choice=choice, template=template, begins_open=begins_open, thinks=thinks)


def _outputs(spec: ModelSpec, body: ChatRequest) -> tuple[str, ...]:
    modalities = [name.strip().lower() for name in body.modalities or ()]
    kinds = check_outputs(spec, modalities or ["text"], "modalities")
    if "audio" in kinds and "text" not in kinds and spec.output("text") is not None:
        return ("text", *kinds)  # audio output always comes with its text
    return kinds


def _format(body: ChatRequest, outputs: Sequence[str]) -> AudioFormat:
    name = body.audio.format if body.audio is not None and "audio" in outputs else None
    if body.stream and name not in (None, STREAMED):
        raise RequestError(
            f"audio.format is {str(name)[:40]!r}, but streams support only {STREAMED}",
            field="audio.format",
            allowed=STREAMED,
            code="unsupported_parameter",
        )
    return audio_format(name or (STREAMED if body.stream else "wav"), "audio.format", CHAT_FORMATS)


async def _whole(
    exchange: Exchange, group: Group, frame: ChatFrame, form: AudioFormat, readers: Sequence[AnswerReader]
) -> HTTPResponse:
    answers = [ChatAnswer(reader) for reader in readers]
    async for piece in group.pieces():
        if piece is not None:
            answers[piece.index].add(piece)
    exchange.warn(group.warnings)
    return exchange.json(await whole_chat(frame, group, answers, form))


async def _stream(exchange: Exchange, group: Group, events: ChatEvents) -> None:
    outputs = group.calls[0].outputs
    async with streaming(exchange):
        async for piece in group.pieces():
            exchange.warn(group.warnings)
            if piece is None:
                await exchange.keep_alive(PING, EVENTS, group.left_s)
            else:
                await exchange.send(events.of(piece, outputs, group), EVENTS, group.left_s)
        await exchange.send(events.end(group), EVENTS, is_last=True)
