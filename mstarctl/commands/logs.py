"""`mstarctl logs`: prints the logs of a deployment's processes or of a gateway, also after its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mstar_core.errors import NotFound, UsageError
from mstar_core.host.run_dir import RunDirectory, deployments, gateways
from mstar_core.observe.frames import LOCAL
from mstarctl.client import LogLine, LogQuery, find_known, read_logs
from mstarctl.client.deployments import find_running, last_log_dir
from mstarctl.client.gateways import running_gateways
from mstarctl.client.log_lines import fields_text, parse_lines
from mstarctl.client.reach import context_of, known_at, reached
from mstarctl.complete import PastDeploymentName, host_names, process_names
from mstarctl.objects.hosts import host_item
from mstarctl.output import Printer
from mstarctl.output.durations import parse_duration
from mstarctl.output.options import GlobalOptions
from mstarctl.output.states import source_role
from mstarctl.output.table import escape

POLL_S = 0.2
TAIL = 200
SOCKET_TAIL = 200
"""Largest number of past lines that the admin socket returns."""

LEVEL_ROLES = {"debug": "faint", "info": "dim", "warning": "warn", "error": "bad", "critical": "bad"}


def logs(
    ctx: typer.Context,
    name: PastDeploymentName = None,
    is_following: Annotated[
        bool, typer.Option("-f", "--follow", help="print new lines until the deployment ends")
    ] = False,
    tail: Annotated[int, typer.Option("--tail", min=0, help="number of past lines")] = TAIL,
    since: Annotated[str, typer.Option("--since", metavar="TIME", help="only the last TIME, such as 10m")] = "",
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="PROCESS",
            help="supervisor, api, conductor, weights or worker/N",
            autocompletion=process_names,
        ),
    ] = "",
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="HOST",
            help="only processes on this host of a running deployment",
            autocompletion=host_names,
        ),
    ] = "",
    level: Annotated[str, typer.Option("--level", help="this level and above: debug, info, warning, error")] = "",
    grep: Annotated[str, typer.Option("--grep", metavar="RE", help="only lines that match")] = "",
    request: Annotated[str, typer.Option("--request", metavar="ID", help="only lines of one request")] = "",
) -> None:
    """Show the logs of a deployment or a gateway."""
    printer = Printer.of(ctx)
    if printer.format == "name":
        raise UsageError("a log line has no name", hint="use -o json or -o yaml; mstarctl events has names")
    oldest_s = time.time() - parse_duration(since, "--since") if since else 0.0
    query = LogQuery.of(source=source, level=level, grep=grep, request=request, oldest_s=oldest_s)
    if host:
        query = replace(query, sources=processes_on(printer.options, name, host))
    if printer.options.socket is not None or not context_of(printer.options).is_local:
        for line in remote_lines(printer.options, name, query, tail, is_following=is_following):
            show(line, printer)
        return
    run, folder = folder_of(name)
    offsets = {path: path.stat().st_size for path in folder.glob("*.log")} if is_following else {}
    for line in read_logs(folder, query, tail):
        show(line, printer)
    if is_following:
        for line in follow(run, folder, offsets):
            if query.takes(line):
                show(line, printer)


def processes_on(options: GlobalOptions, name: str | None, host: str) -> frozenset[str]:
    """Return the processes on a host of a running deployment, its agent included. Raises NotFound."""
    item = host_item(known_at(options, name), host)
    own = {"supervisor"} if item["name"] == LOCAL else {f"agent-{item['name']}"}
    return frozenset({*item["processes"], *own})


def remote_lines(
    options: GlobalOptions, name: str | None, query: LogQuery, tail: int, *, is_following: bool
) -> Iterator[LogLine]:
    """Yield lines from the admin socket of another host, whose files cannot be read here."""
    arguments: dict[str, Any] = {"tail": min(tail, SOCKET_TAIL), "follow": int(is_following)}
    if query.source:
        arguments["from"] = query.source
    with reached(options, name) as target:
        for item in target.admin.lines("/v1/logs", **arguments):
            if item is None:
                continue
            line = LogLine.of(str(item["from"]), str(item["line"]))
            if query.takes(line):
                yield line


def folder_of(name: str | None) -> tuple[RunDirectory | None, Path]:
    """Return the log directory of the running deployment or gateway, else of its last start. Raises NotFound."""
    gateway = running_gateways().get(name or "")
    if gateway is not None and RunDirectory.of(gateway.name).holder() is None:
        folder = last_log_dir(gateway.name)
        if folder is not None:
            return gateway, folder
    known = find_known(find_running(name).name if name is None else name)
    folder = known.log_dir or last_log_dir(known.name)
    if folder is None:
        raise NotFound(f"{known.name} has no logs", kind="deployment", name=known.name)
    return known.run, folder


def show(line: LogLine, printer: Printer) -> None:
    """Print one line, as an object with -o json and -o yaml."""
    if printer.is_machine:
        printer.line({"from": line.source, **(line.facts or {"message": line.text})}, line.source)
        return
    clock = line.time.partition("T")[2][:12]
    level = printer.paint(f"{line.level:<7}", LEVEL_ROLES.get(line.level, "dim"))
    message = (
        printer.paint(escape(line.message), "bad") if line.level in ("error", "critical") else escape(line.message)
    )
    facts = fields_text(line.facts)
    printer.text(
        f"{printer.paint(f'{clock:<12}', 'dim')} {printer.paint(f'{line.source:<10}', source_role(line.source))} "
        f"{level} {message}{'  ' + printer.paint(facts, 'dim') if facts else ''}".rstrip(),
        is_flushed=True,
    )
    for part in str(line.facts.get("traceback", "")).splitlines():
        printer.text(f"{'':<12} {line.source:<10} {'':<7} {escape(part)}", is_flushed=True)


def follow(run: RunDirectory | None, folder: Path, offsets: dict[Path, int]) -> Iterator[LogLine]:
    """Yield new lines after the given offsets until the deployment has ended. Files may be rotated."""
    rest: dict[Path, str] = {}
    while True:
        has_ended = _has_ended(run, folder)
        for path in sorted(folder.glob("*.log")):
            yield from _fresh(path, offsets, rest)
        if has_ended:
            return
        time.sleep(POLL_S)


def _has_ended(run: RunDirectory | None, folder: Path) -> bool:
    return (
        (folder / "outcome.json").exists()
        or run is None
        or run.name not in {other.name for other in (*deployments(), *gateways())}
        or run.holder() is None
    )


def _fresh(path: Path, offsets: dict[Path, int], rest: dict[Path, str]) -> Iterator[LogLine]:
    offset = offsets.get(path, 0)
    if path.stat().st_size < offset:  # the file was rotated
        offset = 0
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
        offsets[path] = file.tell()
    *lines, rest[path] = (rest.get(path, "") + data.decode("utf-8", "replace")).split("\n")
    yield from parse_lines(path.stem, lines)
