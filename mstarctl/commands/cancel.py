"""`mstarctl cancel`: cancels requests by their ids."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mstar_core.errors import MstarError, NotFound, Unavailable
from mstarctl.client.holders import holder_of, request_path
from mstarctl.complete import HolderName, bare, request_ids
from mstarctl.output import Column, Printer
from mstarctl.output.errors import render_error
from mstarctl.output.options import GlobalOptions

COLUMNS = (Column("REQUEST", "name"), Column("RESULT", "result"))


def cancel(
    ctx: typer.Context,
    requests: Annotated[
        list[str],
        typer.Argument(
            metavar="REQUEST...",
            help="ids of requests, as their clients know them",
            autocompletion=request_ids,
            callback=bare,
        ),
    ],
    deployment: HolderName = None,
) -> None:
    """Cancel requests and free their resources."""
    printer = Printer.of(ctx)
    items: list[dict[str, Any]] = []
    failed: list[MstarError] = []
    for request in requests:
        try:
            items.append({"name": request, "result": _cancel(printer.options, request, deployment)})
        except NotFound as error:
            items.append({"name": request, "result": error.title})
            failed.append(error)
    if len(requests) > 1:
        printer.items("cancel", items, COLUMNS)
        for failure in failed[:-1]:
            printer.problem(render_error(failure))
    elif not failed:
        printer.item("cancel", items[0], f"{requests[0]} {items[0]['result']}")
    if failed:
        raise failed[-1]


def _cancel(options: GlobalOptions, request: str, deployment: str | None) -> str:
    with holder_of(options, request, deployment) as holder:
        try:
            answer = holder.admin.post(request_path(request, "cancel"))
        except Unavailable as ended:
            title = f"request {request!r} has already ended"
            raise NotFound(title, ended.detail, kind="request", name=request) from None
    return str(answer.get("status", "cancelled"))
