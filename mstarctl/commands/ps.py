"""`mstarctl ps`: lists the deployments of a host."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from mstar_core.errors import ExitCode, NotFound, UsageError, did_you_mean
from mstar_core.host.leftovers import end_leftovers
from mstarctl.client import Known, find_known, known_deployments
from mstarctl.client.deployments import forget, last_log_dir
from mstarctl.client.gateways import known_gateways
from mstarctl.client.reach import context_of, only_here, reached
from mstarctl.client.tunnel import remote_items
from mstarctl.complete import bare, deployment_names
from mstarctl.objects.host import host_lines, read_host
from mstarctl.output import Column, Printer, age_text
from mstarctl.output.options import GlobalOptions
from mstarctl.output.units import size_text

LOOP: Final = (Column("LATENCY p50", "latency", is_right=True), Column("REQ/s", "requests_s", is_right=True))
"""Columns of control loops, which have no first token: shown with -o wide, or if a deployment has no other figure."""

HOSTS: Final = Column("HOSTS", "hosts", is_right=True)
"""Number of hosts: shown with -o wide, or if a deployment has several."""

COLUMNS: Final[tuple[Column, ...]] = (
    Column("NAME", "name"),
    Column("STATE", "state"),
    Column("RANKS", "ranks", is_right=True),
    HOSTS,
    Column("RUN/QUEUED", "load", is_right=True),
    Column("TTFT p50", "ttft", is_right=True),
    Column("TOK/s", "tokens", is_right=True),
    Column("AUDIO x", "audio", is_right=True),
    *LOOP,
    Column("AGE", "age", is_right=True),
    Column("ENDPOINT", "address"),
    Column("MODEL", "model_shown", is_wide=True),
    Column("TTFT p99", "ttft_p99", is_wide=True, is_right=True),
    Column("DONE", "finished", is_wide=True, is_right=True),
    Column("ERR", "failed", is_wide=True, is_right=True),
    Column("PAGES", "pages", is_wide=True, is_right=True),
    Column("SESSIONS", "sessions", is_wide=True, is_right=True),
    Column("REALTIME", "realtime_sessions", is_wide=True, is_right=True),
    Column("INTERRUPTS", "realtime_interrupts", is_wide=True, is_right=True),
    Column("PID", "pid", is_wide=True, is_right=True),
    Column("RESTARTS", "restarts", is_wide=True, is_right=True),
    Column("CAUSE", "cause_text", is_wide=True),
    Column("LOGS", "log_dir", is_wide=True),
    Column("NOTE", "note"),
)
NOTE_CELLS: Final = 80
"""Width at which the table cuts a cause; `describe` and -o json show all of it."""

FAILED: Final = ("failed", "unhealthy", "silent")
WATCH_S: Final = 1.0
SUMS: Final = (
    "running",
    "waiting",
    "preparing",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "ttfa_p50_ms",
    "latency_p50_ms",
    "tokens_s",
    "audio_x",
    "requests_s",
    "finished",
    "failed",
    "cancelled",
    "refused",
    "pages_used",
    "pages_total",
    "pages_leased",
    "preempted",
    "sessions",
    "realtime_sessions",
    "realtime_interrupts",
)
"""Figures of a deployment, by their names on the admin socket."""


def ps(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="one deployment, also after its end; exit 6 if it failed",
            autocompletion=deployment_names,
            callback=bare,
        ),
    ] = None,
    is_watching: Annotated[
        bool,
        typer.Option(
            "-w", "--watch", help="print again after each change; NDJSON with -o json, documents with -o yaml"
        ),
    ] = False,
    is_clearing: Annotated[
        bool, typer.Option("--clear", help="forget failed and stale deployments, or the one named; logs stay")
    ] = False,
) -> None:
    """List the deployments of this host."""
    printer = Printer.of(ctx)
    if is_clearing:
        only_here(printer.options, "ps --clear")
        clear(name, printer)
        return
    items = _items(printer.options, name)
    if is_watching and printer.is_machine:
        for item in items:
            printer.line({"kind": "deployment", **item}, f"deployment/{item['name']}")
    else:
        _show(items, printer)
    if name is None and not printer.is_machine and printer.options.socket is None:
        say_host(printer)
    if is_watching:
        _watch(name, printer, items)
    if name is not None and items[0]["state"] in FAILED:
        raise typer.Exit(ExitCode.START_FAILED)


def say_host(printer: Printer) -> None:
    """Narrate the resources of this host: free memory, GPUs with their holders."""
    if context_of(printer.options).is_local:
        for line in host_lines(read_host()):
            printer.say(line)


def clear(name: str | None, printer: Printer) -> None:
    """Forget deployments that have failed or lost their supervisor. Raises UsageError for one that runs."""
    deployments = known_deployments() if name is None else [find_known(name)]
    for known in deployments:
        if known.is_running:
            if name is not None:
                raise UsageError(f"{name} is running", f"its state is {known.state}", f"stop it: mstarctl down {name}")
            continue
        ended: list[int] = []
        if known.run is not None:
            ended = end_leftovers(known.run)
            known.run.discard()
        folder = known.log_dir or last_log_dir(known.name)
        if folder is not None:
            forget(folder)
        left = f", and ended what it had left running: pid {', '.join(map(str, ended))}" if ended else ""
        printer.say(f"forgot {known.name}, which was {known.state}{left}")


def _items(options: GlobalOptions, name: str | None) -> list[dict[str, Any]]:
    if options.socket is not None:
        with reached(options, name) as target:
            snapshot = target.admin.snapshot()
            return [item_of(Known(name=target.name, state=snapshot["deployment"]["state"], snapshot=snapshot))]
    context = context_of(options)
    if not context.is_local:
        items = remote_items(context)
        chosen = [item for item in items if name in (None, item["name"])]
        if name is not None and not chosen:
            hint = did_you_mean(name, [str(item["name"]) for item in items])
            raise NotFound(f"no deployment {name!r} on {context.name}", hint=hint, kind="deployment", name=name)
        return chosen
    found_here = [*known_deployments(), *known_gateways()] if name is None else find_here(name)
    return [item_of(known) for known in found_here]


def find_here(name: str) -> list[Known]:
    """Return the deployment or the gateway of this name. Raises NotFound with the nearest name."""
    return known_gateways(lambda each: each == name) or [find_known(name)]


def _show(items: list[dict[str, Any]], printer: Printer) -> None:
    shown = items if printer.is_machine else [for_people(item) for item in items]
    columns = COLUMNS if any(item["note"] for item in items) else COLUMNS[:-1]
    if printer.format != "wide" and not any(map(_is_loop, items)):
        columns = tuple(column for column in columns if column not in LOOP)
    if printer.format != "wide" and not any(item["hosts"] for item in items):
        columns = tuple(column for column in columns if column is not HOSTS)
    printer.items(
        "deployment",
        shown,
        columns,
        empty="no deployments; start one with: mstarctl up MODEL",
    )
    for item in items:
        if item["state"] == "stale":
            cleaned = "the next mstarctl up of this name, or mstarctl ps --clear, cleans it up"
            printer.say(f"{item['name']} is stale: its supervisor was killed; {cleaned}")


def _is_loop(item: Mapping[str, Any]) -> bool:
    """Return whether a deployment answers, but with neither tokens nor sound, as a robot's model does."""
    return item["latency_p50_ms"] is not None and item["ttfa_p50_ms"] is None and not item["tokens_s"]


def _watch(name: str | None, printer: Printer, before: list[dict[str, Any]]) -> None:
    while True:
        time.sleep(WATCH_S)
        items = _items(printer.options, name)
        if list(map(_lasting, items)) == list(map(_lasting, before)):
            continue
        changed = changes(before, items)
        if printer.is_machine:
            for item in changed:
                printer.line({"kind": "deployment", **item}, f"deployment/{item['name']}")
        else:
            news = {str(item["name"]): item for item in changed}
            _show([news.get(str(item["name"]), item) for item in items], printer)
            printer.text("", is_flushed=True)
        before = items


def changes(before: list[dict[str, Any]], items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items that differ between two looks at the deployments, with failures in between in their notes.

    A process may die and be replaced between two looks: then the second one finds the deployment ready again.
    """
    known = {str(item["name"]): item for item in before}
    changed = []
    for item in items:
        old = known.get(str(item["name"]))
        if old is not None and _lasting(old) == _lasting(item):
            continue
        told = [] if old is None else old["failures"]
        cause = (item["cause"] or {}).get("time")
        over = [each for each in item["failures"] if each not in told and each.get("time") != cause]
        notes = [item["note"], *map(_aged, over)] if old is not None else [item["note"]]
        changed.append({**item, "note": "; ".join(filter(None, notes))})
    return changed


def _aged(failure: Mapping[str, Any]) -> str:
    """Return a failure that is over, with its age."""
    age = f", {age_text(time.time() - failure['time'])} ago" if failure.get("time") else ""
    return f"{failure.get('message')}{age}"


def _lasting(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key != "age_s"}


def item_of(known: Known) -> dict[str, Any]:
    """Return one deployment as data in base units, as its supervisor reports it."""
    is_alive = known.is_running
    head = known.head if is_alive else known.outcome
    return {
        "name": known.name,
        "state": known.state,
        "reason": head.get("reason", ""),
        "model": head.get("model"),
        "weights": head.get("weights"),
        "ranks": head.get("ranks"),
        "hosts": head.get("hosts") or None,
        **{key: known.head.get(key) for key in SUMS},
        "age_s": known.head.get("age_s"),
        "endpoint": known.head.get("endpoint"),
        "pid": known.pid if is_alive else None,
        "restarts": known.head.get("restarts"),
        "cordoned": known.head.get("cordoned") or [],
        "asleep": known.head.get("asleep") or [],
        "sleep_level": known.head.get("sleep_level"),
        "given_back_bytes": known.head.get("given_back_bytes"),
        "cause": known.cause,
        "last_failure": known.last_failure,
        "failures": known.failures,
        "log_dir": known.head.get("log_dir") or (None if known.log_dir is None else str(known.log_dir)),
        "socket": str(known.run.admin_socket) if is_alive and known.run is not None else None,
        "note": _note(known),
    }


def _note(known: Known) -> str:
    head = known.head
    match known.state:
        case "silent":
            return f"its supervisor, pid {known.pid}, does not answer"
        case "starting":
            return _progress(head)
        case "sleeping":
            return asleep_text(head)
        case "degraded" | "unhealthy" | "draining":
            return str(head.get("reason", ""))
        case "failed":
            return str((head or known.outcome).get("reason", ""))
        case "ready" if head.get("cordoned"):
            return f"cordoned: rank {', '.join(map(str, head['cordoned']))}"
        case "ready" if head.get("asleep"):
            return asleep_text(head)
        case _:
            return ""


def asleep_text(head: dict[str, Any]) -> str:
    """Return what sleeps, and what it has given back: `level 1, 14.0 GiB free`, or the progress of the wake."""
    if head.get("phase"):
        return _progress(head)
    what = "" if head.get("state") == "sleeping" else f"{', '.join(head['asleep'])} asleep: "
    return f"{what}level {head.get('sleep_level')}, {size_text(int(head.get('given_back_bytes') or 0))} free"


def _progress(head: dict[str, Any]) -> str:
    total = int(head.get("total") or 0)
    share = f" {100 * int(head.get('done') or 0) // total} %" if total else ""
    return f"{head.get('phase', '')}{share}"


def for_people(item: dict[str, Any]) -> dict[str, Any]:
    """Return the item with its cells as text."""
    running, waiting, age, pages = item["running"], item["waiting"], item["age_s"], item["pages_total"]
    return {
        **item,
        "load": None if running is None else f"{running}/{waiting or 0}",
        "ttft": _ms(item["ttft_p50_ms"]),
        "ttft_p99": _ms(item["ttft_p99_ms"]),
        "latency": _ms(item["latency_p50_ms"]),
        "tokens": f"{item['tokens_s']:.0f}" if item["tokens_s"] else None,
        "audio": f"{item['audio_x']:.1f}" if item["audio_x"] else None,
        "pages": f"{item['pages_used']}/{pages}" if pages else None,
        "age": None if age is None else age_text(age),
        "address": (item["endpoint"] or "").removeprefix("http://"),
        "model_shown": f"{item['model']}:{item['weights']}" if item["weights"] in ("tiny", "mini") else item["model"],
        "cause_text": _short(_cause_text(item)),
        "note": _short(item["note"]),
    }


def _cause_text(item: dict[str, Any]) -> str:
    """Return the cause of the state, or the last failure with its age."""
    over = item["last_failure"]
    if item["cause"] or not over:
        return str((item["cause"] or {}).get("message") or "")
    return _aged(over)


def _short(text: str) -> str:
    return text if len(text) <= NOTE_CELLS else f"{text[: NOTE_CELLS - 3]}..."


def _ms(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f} ms"
