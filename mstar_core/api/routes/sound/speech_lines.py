"""Speech of a text that arrives as JSON lines, spoken while it arrives.

The first line has the fields of a speech request, with or without text. Each later line is `{"input": "more text"}`.
A model whose text input grows reads on while it speaks: the text is one utterance, and a long one several. For other
models sentences are requests of their own, one after the other. A model speaks faster than real time, so the next one
is ready before the one that sounds has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from mstar_core.api.exchange import Exchange
from mstar_core.api.group import Group, open_arriving
from mstar_core.api.http.json_lines import json_lines
from mstar_core.api.parse.params import LiveText, ParsedRequest
from mstar_core.api.routes.fields import typed
from mstar_core.api.routes.sound.sound_stream import Ending, SoundSource
from mstar_core.api.schema import SpeechRequest, SpeechText
from mstar_core.api.text.sentences import Sentences
from mstar_core.api.text.utterances import Utterances
from mstar_core.errors import Cancelled, MstarError, RequestError

T = TypeVar("T")

SENTENCE_CHARS: Final = 400
"""Longest sentence, about half a minute of speech; a text without the end of a sentence is cut."""


async def read_lines(exchange: Exchange) -> tuple[SpeechRequest, dict[str, Any], AsyncIterator[str]]:
    """Read the first line. Return it, its other fields, and the texts of all lines.

    Raises as `read_body`; the texts raise as `json_lines`.
    """
    exchange.check_open()
    lines = json_lines(exchange, exchange.limits.max_text_bytes)
    first = await anext(lines, None)
    if first is None:
        raise RequestError("the body has no line", hint='send {"input": "Hello there."} and a line break')
    body, rest = typed({"input": "", **first}, SpeechRequest)
    exchange.take_body_id(first.get("request_id"))
    return body, rest, _texts(body.input, lines)


async def _texts(first: str, lines: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    yield first
    async for line in lines:
        text, rest = typed(line, SpeechText)
        if rest:
            name = next(iter(rest))
            raise RequestError(
                f"{name[:40]} stands in a later line than the first",
                hint="a later line has the field input alone",
                field=name[:40],
            )
        yield text.input


@asynccontextmanager
async def ending_body(exchange: Exchange) -> AsyncIterator[None]:
    """Let a response that fails while its body arrives end the connection. One that has not begun reads the body."""
    try:
        yield
    except MstarError:
        if exchange.has_begun:
            await exchange.drop_body()
        raise
    except asyncio.CancelledError:
        exchange.leave_body()
        raise


@asynccontextmanager
async def spoken_lines(
    exchange: Exchange, texts: AsyncIterator[str], call: Callable[[str | LiveText], Awaitable[ParsedRequest]]
) -> AsyncIterator[SoundSource]:
    """Speak a text during the block. call: makes the request of a sentence or of an utterance. Raises Overloaded."""
    service = exchange.service
    reader = service.pool.text_reader() if service.grows else None
    if reader is None:
        async with spoken_sentences(exchange, texts, call) as source:
            yield source
        return
    async with (
        Utterances(reader).reading(texts) as utterances,
        open_arriving(exchange, _calls(exchange, _some(utterances), call)) as group,
    ):
        yield _source(group)


@asynccontextmanager
async def spoken_sentences(
    exchange: Exchange, texts: AsyncIterator[str], call: Callable[[str], Awaitable[ParsedRequest]]
) -> AsyncIterator[SoundSource]:
    """Speak the sentences of a text during the block. call: makes the request of a sentence. Raises Overloaded."""
    limit = min(SENTENCE_CHARS, exchange.limits.max_speech_chars)
    async with open_arriving(exchange, _calls(exchange, _sentences(texts, limit), call)) as group:
        yield _source(group)


async def _some(utterances: AsyncIterator[LiveText]) -> AsyncIterator[LiveText]:
    is_empty = True
    async for utterance in utterances:
        is_empty = False
        yield utterance
    if is_empty:
        raise _empty()


async def _sentences(texts: AsyncIterator[str], limit: int) -> AsyncIterator[str]:
    sentences, is_empty = Sentences(limit), True
    async for text in texts:
        for sentence in sentences.push(text):
            is_empty = False
            yield sentence
    for sentence in sentences.end():
        is_empty = False
        yield sentence
    if is_empty:
        raise _empty()


def _empty() -> RequestError:
    return RequestError("input is empty", hint="no line has a letter or a digit in its input", field="input")


async def _calls(
    exchange: Exchange, sentences: AsyncIterator[T], call: Callable[[T], Awaitable[ParsedRequest]]
) -> AsyncIterator[ParsedRequest]:
    """Yield the requests of sentences or utterances. While none is complete, the request can be cancelled by its id."""
    registry = exchange.service.registry
    while True:
        with registry.arriving(exchange.request_id, route=exchange.route, key=exchange.key) as waiting:
            try:
                sentence = await anext(sentences, None)
            except BaseException:
                if waiting.is_cancelled:
                    raise Cancelled("the request was cancelled by its id") from None
                raise
        if sentence is None:
            return
        yield await call(sentence)


async def _pcm(group: Group) -> AsyncIterator[bytes | None]:
    async for part in group.pieces():
        if part is None:
            yield None
        else:
            yield b"".join([chunk.data for chunk in part.chunks if chunk.modality == "audio"])


def _source(group: Group) -> SoundSource:
    return SoundSource(pcm=_pcm(group), end=lambda: _ending(group), left_s=lambda: None)


def _ending(group: Group) -> Ending:
    return Ending(usage=group.usage, warnings=group.warnings)
