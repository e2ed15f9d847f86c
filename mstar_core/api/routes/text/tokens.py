"""POST /tokenize and /detokenize: prompts as the model reads them, and the text of token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sanic.response import HTTPResponse

from mstar_core.api.exchange import Exchange
from mstar_core.api.parse.messages import read_messages
from mstar_core.api.parse.params import SILENT, ParsedRequest, check_params
from mstar_core.api.parse.prompts import RawPrompt, read_ids, read_prompts
from mstar_core.api.routes.fields import check_name, read_body, rules_of
from mstar_core.api.routes.text.schema import DetokenizeRequest, PlainText, TokenizeRequest, Tokens
from mstar_core.errors import RequestError, TooLarge, did_you_mean

OUTPUTS = ("text",)


async def tokenize(exchange: Exchange) -> HTTPResponse | None:
    """Return the token ids of a prompt or of messages."""
    service = exchange.service
    body, rest = await read_body(exchange, TokenizeRequest)
    check_name(exchange, body.model)
    _refuse_rest(rest, TokenizeRequest.__struct_fields__)
    exchange.keep_events(None)
    if (body.prompt is None) == (body.messages is None):
        field = "prompt" if body.prompt is None else "messages"
        code = "missing_field" if body.prompt is None else "invalid_value"
        raise RequestError("send either prompt or messages", field=field, code=code)
    call = await _call(exchange, body)
    is_special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
    try:
        ids = await service.pool.tokenize(service.prompt_of(call), adds_special=is_special)
    except RequestError as error:
        raise (call.raw or RawPrompt(field="messages")).renamed(error) from error
    tokens = Tokens(count=len(ids), max_model_len=service.deployment.max_seq_len, tokens=ids)
    if body.return_token_strs:
        tokens.token_strs = [text.decode(errors="replace") for text in await service.pool.spell(ids)]
    return exchange.json(tokens)


async def detokenize(exchange: Exchange) -> HTTPResponse | None:
    """Return the text of token ids."""
    body, rest = await read_body(exchange, DetokenizeRequest)
    check_name(exchange, body.model)
    _refuse_rest(rest, DetokenizeRequest.__struct_fields__)
    exchange.keep_events(None)
    most = exchange.limits.max_text_bytes
    if len(body.tokens) > most:
        raise TooLarge(f"tokens has more than {most} ids", field="tokens", code="body_too_large")
    ids = read_ids(body.tokens, "tokens") if body.tokens else ()
    try:
        texts = await exchange.service.pool.spell(ids)
    except RequestError as error:
        raise RawPrompt(field="tokens").renamed(error) from error
    return exchange.json(PlainText(prompt=b"".join(texts).decode(errors="replace")))


async def _call(exchange: Exchange, body: TokenizeRequest) -> ParsedRequest:
    """Return the request that a completion or a chat with this prompt would be."""
    service = exchange.service
    params = check_params(service.model, {}, rules_of(exchange, OUTPUTS))
    call = params.request(exchange.request_id, exchange.route, text=body.prompt, outputs=OUTPUTS)
    if body.messages is None:
        (prompt,) = read_prompts(body.prompt, "prompt", exchange.limits)
        return dataclasses.replace(call, raw=prompt, order=[("text", 0)])
    read = await read_messages(body.messages, service.model, exchange.limits, service.fetcher)
    return dataclasses.replace(
        call, text=read.text, texts=tuple(read.texts), turns=tuple(read.turns), media=read.media, order=read.order
    )


def _refuse_rest(rest: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise RequestError for fields that the route does not read."""
    unknown = next((name for name in rest if name not in SILENT), None)
    if unknown is not None:
        raise RequestError(
            f"{unknown[:40]} is not a field of this route",
            hint=did_you_mean(unknown, names),
            field=unknown[:40],
            code="unknown_parameter",
        )
