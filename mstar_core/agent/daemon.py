"""Daemon form of the agent: outlives the program that started it, in a session of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mstar_core.errors import ExitCode

Report = Callable[[str], None]
"""Passes one line to the program that started the agent."""


def print_line(line: str) -> None:
    """Report to standard output, which stays open."""
    print(line, flush=True)


def detach() -> Report:
    """Go on as a daemon. Returns in the daemon, with the function that reports its start.

    The calling process prints the reported line and exits, with `START_FAILED` if the daemon ends without one. Called
    before this process has threads.
    """
    reader, writer = os.pipe()
    first = os.fork()
    if first:
        os.close(writer)
        os.waitpid(first, 0)
        with os.fdopen(reader) as report:
            line = report.read()
        sys.stdout.write(line)
        sys.stdout.flush()
        os._exit(int(ExitCode.DONE if line else ExitCode.START_FAILED))
    os.close(reader)
    os.setsid()
    if os.fork():
        os._exit(0)

    def report_once(line: str) -> None:
        os.write(writer, f"{line}\n".encode())
        redirect(Path(os.devnull))  # before the caller goes on: it may wait for the end of its pipes
        os.close(writer)

    return report_once


def redirect(path: Path) -> None:
    """Send standard output and error to a file, and read nothing from standard input."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
