"""`mstarctl requests`: lists requests in flight and recently ended ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
import typer

from mstar_core.errors import UsageError, did_you_mean
from mstar_core.observe.filter import Filter
from mstar_core.observe.frames import RequestStatus, resumption
from mstar_core.observe.request_log import request_item
from mstarctl.client import AdminClient
from mstarctl.client.reach import reached
from mstarctl.client.store import Store
from mstarctl.client.watch import watched
from mstarctl.complete import DeploymentName
from mstarctl.output import Column, Printer, age_text
from mstarctl.output.durations import parse_duration
from mstarctl.output.facts import tick_text
from mstarctl.output.moments import dated, epoch_of, time_of_day

LIMIT_MOST: Final = 1000
WATCH_S: Final = 1.0

COLUMNS: Final = (
    Column("REQUEST", "id"),
    Column("IN → OUT", "way"),
    Column("STATE", "state"),
    Column("AT", "at"),
    Column("RANK", "rank", is_right=True),
    Column("START", "start"),
    Column("TOOK", "age", is_right=True),
    Column("TTFT ms", "ttft", is_right=True),
    Column("TTFA ms", "ttfa", is_right=True),
    Column("TOKENS", "tokens", is_right=True),
    Column("AUDIO", "audio", is_right=True),
    Column("TICK", "tick"),
    Column("WAIT ms", "wait", is_right=True),
    Column("PAGES", "pages", is_wide=True, is_right=True),
    Column("PROMPT", "prompt_tokens", is_wide=True, is_right=True),
    Column("CACHED", "cached_tokens", is_wide=True, is_right=True),
    Column("RTF", "rtf_text", is_wide=True, is_right=True),
    Column("WALKS", "walks_text", is_wide=True),
    Column("ROUTE", "route", is_wide=True),
    Column("PLACED", "placed", is_wide=True),
    Column("HANDLE", "handle", is_wide=True, is_right=True),
    Column("", "note"),
)
SORTS: Final = {
    "state": "state",
    "start": "started",
    "took": "age_s",
    "age": "age_s",
    "ttft": "ttft_ms",
    "ttfa": "ttfa_ms",
    "tokens": "tokens",
    "audio": "audio_s",
    "wait": "waited_ms",
    "pages": "pages",
    "rtf": "rtf",
    "id": "id",
}
"""Sort fields of the command line, with their names in the data."""

IN_TURN: Final = ("resume", "run", "prepare", "queue")
"""States in the order of the default, which is that of `top`."""


def requests(
    ctx: typer.Context,
    name: DeploymentName = None,
    filter_text: Annotated[
        str, typer.Option("--filter", metavar="EXPR", help="such as 'state:queue node:talker ttft>500'")
    ] = "",
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="only requests that began in the last TIME")
    ] = "",
    sort: Annotated[
        str, typer.Option("--sort", metavar="FIELD", help="largest first; -FIELD: smallest first")
    ] = "state",
    limit: Annotated[int, typer.Option("--limit", min=1, max=LIMIT_MOST, help="number of rows")] = 50,
    is_watching: Annotated[
        bool,
        typer.Option(
            "-w", "--watch", help="print again after each change; NDJSON with -o json, documents with -o yaml"
        ),
    ] = False,
) -> None:
    """List requests in flight and recently ended ones."""
    printer = Printer.of(ctx)
    chosen = Filter.parse(filter_text, expressions=True)
    order = order_of(sort)
    since_s = parse_duration(since, "--since") if since else None
    with reached(printer.options, name) as target:
        if is_watching:
            watch(target.admin, chosen, order, since_s, limit, printer)
            return
        head = target.admin.head()
        items, cut = listed(target.admin, chosen, order, since_s, limit)
    show(items, cut, printer, epoch_of(head))


def order_of(text: str) -> tuple[str, bool]:
    """Parse a sort field, such as `-ttft`, into its name and whether it is ascending. Raises UsageError."""
    field = text.removeprefix("-")
    if field not in SORTS:
        raise UsageError(f"requests cannot be sorted by {field!r}", hint=did_you_mean(field, SORTS))
    return field, text.startswith("-")


def listed(
    admin: AdminClient, chosen: Filter, order: tuple[str, bool], since_s: float | None, limit: int
) -> tuple[list[dict[str, Any]], int]:
    """Return the current rows, and the number of rows beyond the limit."""
    field, is_ascending = order
    is_ours = has_expression(chosen.text)
    arguments: dict[str, Any] = {
        "limit": LIMIT_MOST if is_ours else limit,
        "sort": "" if field == "state" else f"{'' if is_ascending else '-'}{SORTS[field]}",
    }
    arguments |= {} if is_ours or not chosen.text else {"filter": chosen.text}
    arguments |= {} if since_s is None else {"since": since_s}
    answer = admin.get("/v1/requests", **arguments)
    items = [item for item in answer["items"] if not is_ours or chosen.takes(*request_of(item))]
    items = in_turn(items, is_ascending=is_ascending) if field == "state" else items
    left_out = int(answer.get("truncated", 0)) + max(0, len(items) - limit)
    return [{"name": item["id"], **item} for item in items[:limit]], left_out


def in_turn(items: list[dict[str, Any]], *, is_ascending: bool) -> list[dict[str, Any]]:
    """Return items in the default order: the oldest running, prepared and waiting ones, then the latest ends."""
    groups = {state: place for place, state in enumerate(IN_TURN)}
    newest = sorted(items, key=lambda item: -item["handle"])
    in_group = sorted(newest, key=lambda item: item["started"] if item["ended"] is None else -item["ended"])
    ordered = sorted(in_group, key=lambda item: groups.get(item["state"], len(groups)))
    return ordered[::-1] if is_ascending else ordered


def request_of(item: Mapping[str, Any]) -> tuple[RequestStatus, float]:
    """Return the request of an item, and the time at which it has the item's age."""
    request = msgspec.convert(dict(item), type=RequestStatus)
    return request, request.started + float(item.get("age_s", 0.0))


def has_expression(text: str) -> bool:
    """Return whether a filter contains a regular expression, `/expression/`, which servers refuse."""
    return any(len(word) > 2 and word.lstrip("!").startswith("/") and word.endswith("/") for word in text.split())


def watched_rows(store: Store, chosen: Filter, since_s: float | None) -> list[dict[str, Any]]:
    """Return the requests of a store that pass the filter, as items."""
    t = store.t
    taken = [request for request in store.requests.values() if chosen.takes(request, t)]
    return [item_of(r, t) for r in taken if since_s is None or t - r.started <= since_s]


def cut_rows(
    items: list[dict[str, Any]], order: tuple[str, bool], limit: int, cut: int
) -> tuple[list[dict[str, Any]], int]:
    """Return items sorted and cut to the limit, and the number left out. Unknown values come last in both orders."""
    if order[0] == "state":
        return in_turn(items, is_ascending=order[1])[:limit], cut + max(0, len(items) - limit)
    field, is_ascending = SORTS[order[0]], order[1]
    known = [item for item in items if item[field] is not None]
    known.sort(key=lambda item: item[field], reverse=not is_ascending)
    items = known + [item for item in items if item[field] is None]
    return items[:limit], cut + max(0, len(items) - limit)


def item_of(request: RequestStatus, t: float) -> dict[str, Any]:
    """Return a request as data in base units, with its age."""
    return {"name": request.id, **request_item(request, t)}


def for_people(item: dict[str, Any]) -> dict[str, Any]:
    """Return a dated item with its cells as text. The start is in the time zone of the reader."""
    ended = item["ended"] is not None
    walks = [f"{walk} x{count}" if count > 1 else walk for walk, count in item["walks"].items()]
    return {
        **item,
        "way": f"{'+'.join(item['inputs']) or '?'} → {'+'.join(item['outputs']) or '?'}",
        "at": item["node"] if item["node"] and not ended else item["state"] if not ended else "",
        "start": time_of_day(item["started"]),
        "age": age_text(item["age_s"]) if item["age_s"] >= 10 else f"{item['age_s']:.1f}s",
        "ttft": _ms(item["ttft_ms"]),
        "ttfa": _ms(item["ttfa_ms"]),
        "audio": f"{item['audio_s']:.1f}s" if item["audio_s"] else "",
        "wait": _ms(item["waited_ms"]),
        "tick": tick_text(item.get("missed_ticks"), has_ended=ended),
        "rtf_text": "" if item["rtf"] is None else f"{item['rtf']:.2f}",
        "walks_text": " ".join([*(f"✓{walk}" for walk in walks), *(f"▶{walk}" for walk in item["active"])]),
        "note": ": ".join(filter(None, (item["error"], item.get("message")))) or item["why"] or told_of(item),
    }


def told_of(item: Mapping[str, Any]) -> str:
    """Return the attempts of a resumed request, and `step 23 of 49` for a running one with a step loop."""
    step = f"step {item['step']} of {item['steps']}" if item.get("steps") and item["ended"] is None else ""
    return ", ".join(filter(None, (resumption(item.get("causes", ()), item.get("pauses_s", ())), step)))


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def show(items: list[dict[str, Any]], cut: int, printer: Printer, epoch_s: float) -> None:
    """Print the list in the format of -o. epoch_s: see `dated`."""
    shown = [dated(item, epoch_s) for item in items]
    shown = shown if printer.is_machine else [for_people(item) for item in shown]
    has_notes = any(item["error"] or item["why"] or told_of(item) for item in items)
    has_ticks = any(item.get("period_ms") for item in items)
    columns = [c for c in COLUMNS if (has_notes or c.key != "note") and (has_ticks or c.key != "tick")]
    printer.items("request", shown, columns, truncated=cut, empty="no requests")


def watch(
    admin: AdminClient, chosen: Filter, order: tuple[str, bool], since_s: float | None, limit: int, printer: Printer
) -> None:
    """Print again after each change, at most once per second; with -o json each changed request as a line."""
    before: dict[int, dict[str, Any]] = {}
    changes, due = -1, 0.0
    sent = "" if has_expression(chosen.text) else chosen.text
    for store in watched(admin, ("requests",), filter_text=sent):
        if store.changes == changes or time.monotonic() < due:
            continue
        changes, due = store.changes, time.monotonic() + WATCH_S
        rows, cut = watched_rows(store, chosen, since_s), store.truncated.get("requests", 0)
        items, cut = cut_rows(rows, order, limit, cut)
        epoch_s = store.deployment.started_at - store.deployment.started
        if not printer.is_machine:
            show(items, cut, printer, epoch_s)
            printer.text("", is_flushed=True)
            continue
        now = {int(item["handle"]): lasting(item) for item in items}
        for item in items:
            if before.get(int(item["handle"])) != now[int(item["handle"])]:
                printer.line({"kind": "request", **dated(item, epoch_s)}, f"request/{item['name']}")
        before = now


def lasting(item: dict[str, Any]) -> dict[str, Any]:
    """Return the item without fields that change with time alone."""
    return {key: value for key, value in item.items() if key not in ("age_s", "rtf", "missed_ticks")}
