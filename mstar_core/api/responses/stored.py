"""GET, DELETE, cancellation and input items of /v1/responses/{id}: responses that the server keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from sanic.response import HTTPResponse

from mstar_core.api.errors import EventsGone
from mstar_core.api.exchange import JSON, Exchange
from mstar_core.api.requests.background import BackgroundRun
from mstar_core.api.requests.response_store import StoredResponse, owner_of
from mstar_core.api.responses.background import settled
from mstar_core.api.responses.items import decoded
from mstar_core.api.responses.options import check_include
from mstar_core.api.responses.schema import DeletedResponse, Item, ItemList, ResponseObject
from mstar_core.api.routes.request_state import follow
from mstar_core.errors import NotFound, RequestError
from mstar_core.plugin.params import parse_bool

MOST_ITEMS: Final = 100
ITEMS: Final = 20
MOST_DIGITS: Final = 15


async def retrieve(exchange: Exchange) -> HTTPResponse | None:
    """Return a response, or with `stream` the events of one that was created in the background."""
    check_include(exchange.request.args.getlist("include") or exchange.request.args.getlist("include[]") or ())
    is_streamed = parse_bool(exchange.request.args.get("stream") or "false")
    after = _number(exchange, "starting_after", -1)
    if is_streamed is None:
        raise RequestError("stream must be true or false", field="stream", allowed="true, false")
    if is_streamed:
        await _events(exchange, after)
        return None
    run = _run(exchange)
    if run is not None:
        return exchange.json(run.response)
    return exchange.whole((await _found(exchange)).body, JSON)


async def delete(exchange: Exchange) -> HTTPResponse:
    """Delete a response. One that is generated in the background is cancelled."""
    service, response_id, run = exchange.service, exchange.path_name, _run(exchange)
    if run is not None:
        run.is_deleted = True
        await run.cancel(service.registry)
    elif not await service.responses.delete(response_id, owner_of(exchange.key)):
        raise unknown(response_id)
    return exchange.json(DeletedResponse(id=response_id))


async def cancel(exchange: Exchange) -> HTTPResponse:
    """Cancel a response in the background. Has no effect on a finished one."""
    run = _run(exchange)
    if run is not None:
        await run.cancel(exchange.service.registry)
        return exchange.json(run.response)
    entry = await _found(exchange)
    if not msgspec.json.decode(entry.body, type=ResponseObject).background:
        raise RequestError(
            "only responses with background: true can be cancelled",
            hint="close the connection, or cancel the request by its X-Request-ID",
            field="response_id",
            code="not_in_background",
        )
    return exchange.whole(entry.body, JSON)


async def input_items(exchange: Exchange) -> HTTPResponse:
    """Return a page of the items that a response was generated from, those of the conversation before it included."""
    args = exchange.request.args
    check_include(args.getlist("include") or args.getlist("include[]") or ())
    order, limit = args.get("order") or "desc", _number(exchange, "limit", ITEMS)
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc", field="order", allowed="asc, desc")
    if not 1 <= limit <= MOST_ITEMS:
        raise RequestError(f"limit must be 1 to {MOST_ITEMS}", field="limit", allowed=f"1 to {MOST_ITEMS}")
    entries = await exchange.service.responses.conversation(exchange.path_name, owner_of(exchange.key))
    if not entries:
        raise unknown(exchange.path_name)
    items = [*conversation_items(entries[:-1]), *decoded(entries[-1].items)]
    ordered = items if order == "asc" else items[::-1]
    return exchange.json(_page(ordered, args.get("after"), limit))


def conversation_items(entries: Sequence[StoredResponse]) -> list[Item]:
    """Return inputs and outputs of responses, in order."""
    items: list[Item] = []
    for entry in entries:
        items += decoded(entry.items)
        items += msgspec.json.decode(entry.body, type=ResponseObject).output
    return items


def _page(items: Sequence[Item], after: str | None, limit: int) -> ItemList:
    start = 0
    if after:
        start = next((number for number, item in enumerate(items, start=1) if item.id == after), -1)
        if start < 0:
            raise RequestError(f"after: the response has no item {after[:80]!r}", field="after")
    page = items[start : start + limit]
    first, last = (str(page[0].id), str(page[-1].id)) if page else ("", "")
    return ItemList(data=list(page), first_id=first, last_id=last, has_more=len(items) > start + limit)


async def _events(exchange: Exchange, after: int) -> None:
    if _run(exchange) is None:
        await _found(exchange)  # events are kept of requests to other routes too
    log = exchange.service.kept_events.find(exchange.path_name, exchange.key)
    if log is None:
        raise EventsGone(
            "the events of this response are not kept any more, or it was not created with background: true",
            hint="retrieve it without stream",
            field="stream",
        )
    await follow(exchange, log, after + 1)  # events count from 1, sequence numbers from 0


def _run(exchange: Exchange) -> BackgroundRun | None:
    return exchange.service.background.find(exchange.path_name, exchange.key)


async def _found(exchange: Exchange) -> StoredResponse:
    entry = await exchange.service.responses.find(exchange.path_name, owner_of(exchange.key))
    if entry is None:
        raise unknown(exchange.path_name)
    return await settled(exchange.service, entry)


def _number(exchange: Exchange, name: str, default: int) -> int:
    value = exchange.request.get_args(keep_blank_values=True).get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) <= MOST_DIGITS):
        raise RequestError(f"{name} must be an integer >= 0", field=name, allowed=">= 0")
    return int(value)


def unknown(response_id: str, field: str = "response_id") -> NotFound:
    """Return the error for an unknown id, which is also used for responses of other API keys."""
    return NotFound(
        f"there is no response {response_id[:80]!r}",
        hint="responses are stored for a while, unless their request has store: false",
        code="response_not_found",
        field=field,
    )
