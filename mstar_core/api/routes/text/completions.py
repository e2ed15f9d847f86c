"""POST /v1/completions: prompts without a template in, their continuations out, as JSON or server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sanic.response import HTTPResponse

from mstar_core.api.exchange import DONE, PING, Exchange, event, streaming
from mstar_core.api.group import Group, GroupPart, open_prompts
from mstar_core.api.output.kept_events import EVENTS, Event
from mstar_core.api.parse.params import ParsedRequest
from mstar_core.api.parse.prompts import RawPrompt, read_prompts
from mstar_core.api.routes.chat_answer import reason_of, usage_of
from mstar_core.api.routes.fields import check_count, check_name, openai_parsed, read_body
from mstar_core.api.routes.text.schema import Completion, CompletionChoice, CompletionRequest
from mstar_core.api.schema import Usage
from mstar_core.errors import RequestError

OUTPUTS = ("text",)


async def completion(exchange: Exchange) -> HTTPResponse | None:
    """Handle one request. Returns the whole response, or None if it was streamed."""
    body, rest = await read_body(exchange, CompletionRequest)
    check_name(exchange, body.model)
    count = _count(exchange, body)
    calls = raw_calls(exchange, read_prompts(body.prompt, "prompt", exchange.limits), rest, OUTPUTS)
    exchange.keep_events(EVENTS if body.stream else None)
    echoes = await _echoes(exchange, calls) if body.echo else [""] * len(calls)
    async with open_prompts(exchange, calls, count) as group:
        answer = CompletionAnswer(exchange, group, [echo for echo in echoes for _ in range(count)])
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
    return [
        ParsedRequest(
            request_id=exchange.request_id,
            route=exchange.route,
            text=prompt.text,
            raw=prompt,
            order=[("text", 0)],
            outputs=outputs,
            params=params.params,
            seed=params.seed,
            timeout_s=params.timeout_s,
            loop=params.loop,
            warnings=params.warnings,
            stops=params.stops,
        )
        for prompt in prompts
    ]


def _count(exchange: Exchange, body: CompletionRequest) -> int:
    """Return `n`. Raises RequestError for fields that would change the completions and are not supported."""
    count = check_count(exchange, body.n)
    wrong = {"best_of": body.best_of not in (None, count), "suffix": bool(body.suffix)}
    for field, is_wrong in wrong.items():
        if is_wrong:
            hint = "omit it, or send the value of n" if field == "best_of" else "omit it"
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
    """The completions of a group, whole and as events. echoes: text before each."""

    exchange: Exchange
    group: Group
    echoes: Sequence[str]

    def body(self, choices: list[CompletionChoice]) -> Completion:
        """Return an object of the answer."""
        exchange = self.exchange
        return Completion(
            id=f"cmpl-{exchange.request_id}",
            created=int(exchange.created),
            model=exchange.service.deployment.name,
            choices=choices,
            system_fingerprint=f"seed-{self.group.calls[0].seed}",
        )

    def whole(self, texts: Sequence[str]) -> Completion:
        """Return the answer of a finished group. texts: of each item."""
        choices = [
            CompletionChoice(index=index, text=f"{echo}{text}", finish_reason=reason_of(self.group, index))
            for index, (echo, text) in enumerate(zip(self.echoes, texts, strict=True))
        ]
        body = self.body(choices)
        body.usage = usage_of(self.group)
        return body

    def events(self, piece: GroupPart, *, is_first: bool, is_counted: bool) -> list[Event]:
        """Return the events of one part, one for each text.

        is_first: the part is the first of its item. is_counted: events have a usage field, which is null.
        """
        texts = [self.echoes[piece.index]] if is_first else []
        texts += [chunk.data.decode() for chunk in piece.chunks if chunk.modality == "text"]
        choices = [CompletionChoice(index=piece.index, text=text) for text in texts if text]
        if piece.done is not None:
            choices.append(
                CompletionChoice(index=piece.index, text="", finish_reason=reason_of(self.group, piece.index))
            )
        return [self.event([choice], None, is_counted=is_counted) for choice in choices]

    def event(self, choices: list[CompletionChoice], usage: Usage | None, *, is_counted: bool) -> Event:
        """Return an event of a stream."""
        body = self.body(choices)
        if is_counted:
            body.usage = usage
        return event(body)


async def _whole(exchange: Exchange, group: Group, answer: CompletionAnswer) -> HTTPResponse:
    parts: list[list[str]] = [[] for _ in group.calls]
    async for piece in group.pieces():
        if piece is not None:
            parts[piece.index] += [chunk.data.decode() for chunk in piece.chunks if chunk.modality == "text"]
    exchange.warn(group.warnings)
    return exchange.json(answer.whole(["".join(texts) for texts in parts]))


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
        last = [answer.event([], usage_of(group), is_counted=True)] if is_counted else []
        await exchange.send([*last, DONE], EVENTS)
