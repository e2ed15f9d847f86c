"""`mstarctl help`: explains a command, or the exit codes."""

from __future__ import annotations

from typing import Annotated

import typer

from mstar_core.errors import ExitCode
from mstarctl.output import Column, Printer

MEANINGS: dict[ExitCode, str] = {
    ExitCode.DONE: "done",
    ExitCode.INTERNAL: "internal error (traceback saved, path shown)",
    ExitCode.USAGE: "wrong usage",
    ExitCode.INVALID: "invalid config, plugin or input file",
    ExitCode.NOT_FOUND: "no such object",
    ExitCode.UNREACHABLE: "deployment not reachable, or it accepts no requests now",
    ExitCode.START_FAILED: "start failed, also because the name, the port or a GPU is in use",
    ExitCode.TIMED_OUT: "timed out or stalled",
    ExitCode.ASSERTION: "assertion or regression failed",
    ExitCode.REFUSED: "refused (peer uid, read-only)",
    ExitCode.CANCELLED: "the request was cancelled by its id",
    ExitCode.INTERRUPTED: "ended by Ctrl-C or a signal",
}


def show_help(
    ctx: typer.Context,
    topic: Annotated[list[str] | None, typer.Argument(help="exit-codes, or a command", metavar="[TOPIC]...")] = None,
) -> None:
    """Explain a command, or the exit codes."""
    if topic == ["exit-codes"]:
        _exit_codes(Printer.of(ctx))
        return
    from mstarctl.main import run

    raise typer.Exit(run([*(topic or []), "--help"]))


def _exit_codes(printer: Printer) -> None:
    items = [{"name": code.name.lower(), "exit": int(code), "meaning": MEANINGS[code]} for code in ExitCode]
    printer.items("exit-code", items, [Column("EXIT", "exit", is_right=True), Column("MEANING", "meaning")])
