"""POST /v1/completions: prompts without a template in, their continuations out, as JSON or server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from sanic.response import HTTPResponse

from mstar_core.api.exchange import DONE, PING, Exchange, event, streaming
from mstar_core.api.group import Group, GroupPart, open_prompts
from mstar_core.api.output.encode import EncodedChunk
from mstar_core.api.output.kept_events import EVENTS, Event
from mstar_core.api.output.token_scores import TokenScore
from mstar_core.api.parse.capabilities import LOGPROBS, check_capability
from mstar_core.api.parse.constraint import read_text_form, text_constraint
from mstar_core.api.parse.logprobs import with_logprobs
from mstar_core.api.parse.params import ParsedRequest, constrained
from mstar_core.api.parse.prompts import RawPrompt, read_prompts
from mstar_core.api.routes.fields import answered_name, check_count, check_name, openai_parsed, read_body
from mstar_core.api.routes.text.schema import CompletionChoice, CompletionRequest, TextCompletion
from mstar_core.api.schema import CompletionLogprobs, Usage
from mstar_core.api.text.logprobs import completion_logprobs_of
from mstar_core.errors import RequestError

OUTPUTS = ("text",)


async def completion(exchange: Exchange) -> HTTPResponse | None:
    """Handle one request. Returns the whole response, or None if it was streamed."""
    body, rest = await read_body(exchange, CompletionRequest)
    check_name(exchange, body.model)
    count = _count(exchange, body)
    asked = read_text_form(exchange.service.model, body, OUTPUTS)
    calls = raw_calls(exchange, read_prompts(body.prompt, "prompt", exchange.limits), rest, OUTPUTS)
    constraint = await text_constraint(asked, exchange.service.grammars)
    if constraint is not None:
        calls = [replace(call, params=constrained(call.params, constraint)) for call in calls]
    if body.logprobs is not None:
        check_capability(exchange.service.model, LOGPROBS, "logprobs")
        calls = [replace(call, params=with_logprobs(call.params, body.logprobs)) for call in calls]
    exchange.keep_events(EVENTS if body.stream else None)
    echoes = await _echoes(exchange, calls) if body.echo else [""] * len(calls)
    async with open_prompts(exchange, calls, count) as group:
        model = answered_name(exchange, body.model)
        answer = CompletionAnswer(exchange, group, model, [echo for echo in echoes for _ in range(count)])
        if not body.stream:
            return await _whole(exchange, group, answer)
        is_counted = body.stream_options is not None and body.stream_options.include_usage
        await _stream(exchange, group, answer, is_counted=is_counted)
    return None


def raw_calls(
    exchange: Exchange, prompts: Sequence[RawPrompt], rest: dict[str, Any], outputs: tuple[str, ...]
) -> list[ParsedRequest]:
    """Return a request for each prompt, all with the same parameters. Raises RequestError."""
    params = openai_parsed(exchange, rest, outputs)
    call = params.request(exchange.request_id, exchange.route, outputs=outputs, order=[("text", 0)])
    return [replace(call, text=prompt.text, raw=prompt) for prompt in prompts]


def _count(exchange: Exchange, body: CompletionRequest) -> int:
    """Return `n`. Raises RequestError for fields that would change the completions and are not supported."""
    count = check_count(exchange, body.n)
    refused = {
        "best_of": (body.best_of not in (None, count), "omit it, or send the value of n"),
        "suffix": (bool(body.suffix), "omit it"),
        "echo": (body.echo and body.logprobs is not None, "prompts have no log-probabilities: omit echo or logprobs"),
    }
    for field, (is_wrong, hint) in refused.items():
        if is_wrong:
            raise RequestError(f"{field} is not supported", hint=hint, field=field, code="unsupported_parameter")
    return count


async def _echoes(exchange: Exchange, calls: Sequence[ParsedRequest]) -> list[str]:
    """Return the text of each prompt."""
    return list(await asyncio.gather(*(_echo(exchange, call.raw) for call in calls if call.raw is not None)))


async def _echo(exchange: Exchange, prompt: RawPrompt) -> str:
    if not prompt.ids:
        return prompt.text or ""
    try:
        texts = await exchange.service.pool.spell(prompt.ids)
    except RequestError as error:
        raise prompt.renamed(error) from error
    return b"".join(texts).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """The completions of a group, whole and as events. model: its name in the answer. echoes: text before each."""

    exchange: Exchange
    group: Group
    model: str
    echoes: Sequence[str]

    def body(self, choices: list[CompletionChoice]) -> TextCompletion:
        """Return an object of the answer."""
        exchange = self.exchange
        return TextCompletion(
            id=f"cmpl-{exchange.request_id}",
            created=int(exchange.created),
            model=self.model,
            choices=choices,
            system_fingerprint=f"seed-{self.group.calls[0].seed}",
        )

    def whole(self, parts: Sequence[Sequence[EncodedChunk]]) -> TextCompletion:
        """Return the answer of a finished group. parts: chunks of text of each item."""
        choices = []
        for index, (echo, chunks) in enumerate(zip(self.echoes, parts, strict=True)):
            choice = CompletionChoice(index=index, text=echo + "".join(chunk.data.decode() for chunk in chunks))
            choice.logprobs = self._logprobs(index, [score for chunk in chunks for score in chunk.scores])
            choice.finish_reason = self._reason(index)
            choices.append(choice)
        body = self.body(choices)
        body.usage = self.usage()
        return body

    def events(self, piece: GroupPart, *, is_first: bool, is_counted: bool) -> list[Event]:
        """Return the events of one part, one for each text.

        is_first: the part is the first of its item. is_counted: events have a usage field, which is null.
        """
        index = piece.index
        choices = [CompletionChoice(index=index, text=self.echoes[index])] if is_first and self.echoes[index] else []
        for chunk in piece.chunks:
            if chunk.modality == "text" and (chunk.data or chunk.scores):
                choice = CompletionChoice(index=index, text=chunk.data.decode())
                choice.logprobs = self._logprobs(index, chunk.scores)
                choices.append(choice)
        if piece.done is not None:
            choices.append(CompletionChoice(index=index, text="", finish_reason=self._reason(index)))
        return [self.event([choice], None, is_counted=is_counted) for choice in choices]

    def usage(self) -> Usage:
        """Return the usage of the finished group."""
        return msgspec.convert(self.group.usage, Usage)

    def _logprobs(self, index: int, scores: Sequence[TokenScore]) -> CompletionLogprobs | None:
        count = getattr(self.group.calls[index].params, LOGPROBS, None)
        return None if count is None else completion_logprobs_of(scores, has_others=count > 0)

    def _reason(self, index: int) -> Literal["stop", "length"]:
        return "length" if self.group.done[index].finish_reason == "length" else "stop"

    def event(self, choices: list[CompletionChoice], usage: Usage | None, *, is_counted: bool) -> Event:
        """Return an event of a stream."""
        body = self.body(choices)
        if is_counted:
            body.usage = usage
        return event(body)


async def _whole(exchange: Exchange, group: Group, answer: CompletionAnswer) -> HTTPResponse:
    parts: list[list[EncodedChunk]] = [[] for _ in group.calls]
    async for piece in group.pieces():
        if piece is not None:
            parts[piece.index] += [chunk for chunk in piece.chunks if chunk.modality == "text"]
    exchange.warn(group.warnings)
    return exchange.json(answer.whole(parts))


async def _stream(exchange: Exchange, group: Group, answer: CompletionAnswer, *, is_counted: bool) -> None:
    begun: set[int] = set()
    async with streaming(exchange):
        async for piece in group.pieces():
            exchange.warn(group.warnings)
            if piece is None:
                await exchange.keep_alive(PING, EVENTS, group.left_s)
                continue
            events = answer.events(piece, is_first=piece.index not in begun, is_counted=is_counted)
            begun.add(piece.index)
            await exchange.send(events, EVENTS, group.left_s)
        last = [answer.event([], answer.usage(), is_counted=True)] if is_counted else []
        await exchange.send([*last, DONE], EVENTS, is_last=True)
