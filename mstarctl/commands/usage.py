"""`mstarctl usage`: shows what tenants have used, from the gateway's store; no gateway must run."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from typing import Annotated, Any, Final

import typer

from mstar_core.errors import UsageError, did_you_mean
from mstar_core.gateway.tenants.accounts.folder import gateway_folder
from mstar_core.gateway.tenants.usage import GROUPS, SUMS, today, usage
from mstarctl.output import Column, Printer

DAYS: Final = 30
"""Days that are shown by default, today included."""

TITLES: Final = {
    "requests": "REQUESTS",
    "errors": "ERR",
    "refused": "REFUSED",
    "unknown": "UNKNOWN",
    "input_tokens": "TOKENS IN",
    "cached_tokens": "CACHED",
    "output_tokens": "TOKENS OUT",
    "audio_in_s": "AUDIO IN s",
    "audio_out_s": "AUDIO OUT s",
    "images": "IMAGES",
    "video_s": "VIDEO s",
    "device_s": "DEVICE s",
    "running": "RUNNING",
}
ALWAYS: Final = ("requests", "errors", "input_tokens", "cached_tokens", "output_tokens")
"""Totals that a table shows also if all are zero."""


def show_usage(
    ctx: typer.Context,
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="of one tenant")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="of one model")] = None,
    day: Annotated[
        str | None, typer.Option("--day", metavar="DAY", help="of one UTC day: 2026-03-01, today or yesterday")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="DAY|TIME", help=f"from this day on, or the last 7d; default: the last {DAYS}d"
        ),
    ] = None,
    by: Annotated[
        str, typer.Option("--by", metavar="GROUPS", help=f"sums for each: {', '.join(GROUPS)}, comma-separated")
    ] = "tenant,model",
    is_csv: Annotated[bool, typer.Option("--csv", help="print comma-separated values with a header")] = False,
) -> None:
    """Show what tenants have used, by day, model and key."""
    printer = Printer.of(ctx)
    groups = _groups(by)
    first, last = _days(day, since)
    found = usage(gateway_folder(), by=groups, tenant=tenant, model=model, since=first, until=last)
    items = [
        {name: round(value, 3) if isinstance(value, float) else value for name, value in each.items()} for each in found
    ]
    items = [{"name": "/".join(str(item[group] or "-") for group in groups) or "all", **item} for item in items]
    if is_csv:
        _print_csv(printer, items, groups)
        return
    until = "now" if last is None else last.isoformat()
    empty = f"no requests came through a gateway from {first.isoformat()} until {until}"
    printer.items("usage", items, _columns(groups, items), empty=empty)


def _groups(by: str) -> tuple[str, ...]:
    groups = tuple(dict.fromkeys(part.strip() for part in by.split(",") if part.strip()))
    for group in groups:
        if group not in GROUPS:
            raise UsageError(f"usage cannot be summed by {group!r}", hint=did_you_mean(group, GROUPS))
    return groups


def _days(day: str | None, since: str | None) -> tuple[date, date | None]:
    """Return the first and the last day. Raises UsageError."""
    if day is not None and since is not None:
        raise UsageError("--day and --since exclude each other", hint="give one of them")
    if day is not None:
        only = _day(day, "--day")
        return only, only
    if since is None:
        return today() - timedelta(days=DAYS - 1), None
    return _day(since, "--since"), None


def _day(text: str, option: str) -> date:
    named = {"today": 0, "yesterday": 1}
    if text in named:
        return today() - timedelta(days=named[text])
    try:
        return date.fromisoformat(text)
    except ValueError:
        pass
    if option == "--since" and text[-1:] == "d" and text[:-1].isdecimal():
        return today() - timedelta(days=int(text[:-1]) - 1)
    hint = "write a day such as 2026-03-01, today, or yesterday" + (", or 7d" if option == "--since" else "")
    raise UsageError(f"{option} is {text!r}", hint=hint)


def _columns(groups: Sequence[str], items: Sequence[Mapping[str, Any]]) -> list[Column]:
    used = [name for name in TITLES if name in ALWAYS or any(item[name] for item in items)]
    sums = [Column(TITLES[name], name, is_right=True, is_wide=name not in used) for name in TITLES]
    return [*(Column(group.upper(), group) for group in groups), *sums]


def _print_csv(printer: Printer, items: Sequence[Mapping[str, Any]], groups: Sequence[str]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, (*groups, *SUMS, "running"), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(items)
    printer.text(text.getvalue().rstrip("\n"))
