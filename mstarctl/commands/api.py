"""`mstarctl api`: sends one raw request to the admin socket."""

from __future__ import annotations

import enum
import sys
from typing import Annotated

import typer

from mstar_core.errors import UsageError
from mstarctl.client.admin import error_of
from mstarctl.client.reach import reached
from mstarctl.complete import DeploymentName, api_paths
from mstarctl.output import Printer


class Method(enum.StrEnum):
    """HTTP methods of the admin socket."""

    GET = "GET"
    POST = "POST"
    DELETE = "DELETE"


def api(
    ctx: typer.Context,
    method: Annotated[Method, typer.Argument(metavar="METHOD", help="GET, POST or DELETE", case_sensitive=False)],
    path: Annotated[str, typer.Argument(metavar="PATH", help="such as /v1/snapshot", autocompletion=api_paths)],
    name: DeploymentName = None,
    body: Annotated[str, typer.Option("--body", metavar="JSON", help="request body; - reads it from stdin")] = "",
) -> None:
    """Send one request to the admin socket and print the response as it arrives."""
    printer = Printer.of(ctx)
    if not path.startswith("/") or any(character.isspace() for character in path):
        raise UsageError(f"{path!r} is not a path", hint="begin with /, such as /v1/snapshot")
    data = sys.stdin.buffer.read() if body == "-" else body.encode()
    with reached(printer.options, name, takes_gateways=True) as target:
        status, _, pieces = target.admin.raw(method.value, path, data)
        if status >= 400:
            raise error_of(status, b"".join(pieces))
        last = b"\n"
        for piece in pieces:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            last = piece
    if not last.endswith(b"\n"):
        printer.text("")
