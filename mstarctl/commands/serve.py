"""`mstarctl serve`: a gateway in front of deployments, with one address for many models."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from typer.core import TyperGroup

from mstar_core.errors import ExitCode, MstarError, NotFound, Unreachable, UsageError
from mstar_core.gateway.fleet.local_host import LocalHost
from mstar_core.gateway.fleet.plans import KeptPlans
from mstar_core.gateway.serve_file import ModelEntry, ServeFile, load_serve_file, read_entry
from mstar_core.gateway.sleep_rule import can_sleep, caution_of
from mstar_core.gateway.tenants.accounts.folder import gateway_folder
from mstar_core.host.hardware.gpus import count_gpus
from mstar_core.host.run_dir import RunDirectory
from mstarctl.client import AdminClient
from mstarctl.client.gateways import find_gateway
from mstarctl.client.reach import only_here
from mstarctl.complete import gateway_names, target_names
from mstarctl.output import Column, Printer
from mstarctl.output.durations import parse_duration
from mstarctl.output.units import counted
from mstarctl.serve.changes import ModelChanges, places_text, progress_text
from mstarctl.serve.gateway import NAME, StartedGateway, ending, start_gateway, wait_serving
from mstarctl.start.served_models import check_starts
from mstarctl.start.service.notify import READY, STOPPING, notify
from mstarctl.start.target import parse_set, wrap

COLUMNS: Final = (
    Column("MODEL", "name"),
    Column("STATE", "state"),
    Column("REPLICAS", "count", is_right=True),
    Column("HOSTS", "hosts", is_wide=True),
    Column("RUN/QUEUED", "load", is_right=True),
    Column("WAKES", "wakes", is_right=True),
    Column("SLEEP", "sleep"),
    Column("ALIASES", "names"),
    Column("FILE", "file", is_wide=True),
    Column("URL", "urls", is_wide=True),
    Column("NOTE", "note"),
)
SLEEPS: Final = {True: "can", False: "cannot", None: "-"}
END_S: Final = 30.0
FOLLOW_S: Final = 1.0
"""Time between two readings of the models of an attached gateway."""

POLL_S: Final = 0.1


class ServeGroup(TyperGroup):
    """The group of `serve`. Without a subcommand it starts a gateway."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `up` before the arguments of a start."""
        is_help = any(word in ("-h", "--help") for word in args)
        if not ctx.resilient_parsing and not is_help and not any(word in self.commands for word in args):
            args = ["up", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(
    cls=ServeGroup,
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=False,
    help="Serve many models at one address. Without a subcommand: start a gateway (`serve up`).",
)


GatewayName = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="optional if only one runs", autocompletion=gateway_names)
]
GatewayOption = Annotated[
    str | None,
    typer.Option("--gateway", metavar="NAME", help="optional if only one runs", autocompletion=gateway_names),
]


@app.command("up")
def up(
    ctx: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="serve.yaml; without it, every running deployment is served")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="name of the gateway")] = NAME,
    host: Annotated[str | None, typer.Option("--host", help="address to listen on; default 127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option("--port", min=1, max=65535, help="port; default 8080")] = None,
    is_detached: Annotated[bool, typer.Option("-d", "--detach", help="leave it running and return")] = False,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="check the file only; start nothing")] = False,
    log_level: Annotated[str, typer.Option("--log-level", help="DEBUG, INFO, WARNING or ERROR")] = "INFO",
) -> None:
    """Start a gateway in front of deployments."""
    printer = Printer.of(ctx)
    only_here(printer.options, "serve")
    serve = ServeFile() if file is None else load_serve_file(file)
    serve = msgspec.structs.replace(serve, host=host or serve.host, port=port or serve.port)
    shown = counted(len(serve.models), "model") if serve.models else "every running deployment"
    printer.say(f"{name}: {shown} on {serve.host}:{serve.port}")
    _say_cautions(serve.models.values(), serve, printer)
    check_starts(serve, printer)
    if is_dry:
        printer.item("gateway", {"name": name, **msgspec.to_builtins(serve)}, _entries(serve))
        return
    started = start_gateway(name, serve, log_level, tuple(sys.argv[1:]))
    head = wait_serving(started)
    printer.say(f"{printer.paint('ready', 'ok', sys.stderr)} {head['endpoint']}")
    printer.say(f"  models: mstarctl serve ls {name}          stop: mstarctl serve down {name}")
    if printer.is_machine:
        printer.item("gateway", head, "")
    if not is_detached:
        notify(READY, f"serves on {serve.host}:{serve.port}")
        _attached(started, printer)


def _say_cautions(entries: Iterable[ModelEntry], serve: ServeFile, printer: Printer) -> None:
    """Print models whose `keep` needs a sleep that they cannot have."""
    for entry in entries:
        if caution := caution_of(entry, can_sleep(entry, serve, has_gpu=count_gpus() > 0)):
            printer.warn(f"{entry.name}: {caution}")


def _entries(serve: ServeFile) -> list[str]:
    return [
        f"{entry.name}  {entry.url or entry.target or entry.file}  {entry.keep_text}  {entry.replicas_text} replicas"
        for entry in serve.models.values()
    ]


def _attached(started: StartedGateway, printer: Printer) -> None:
    """Stay until the gateway ends. The first Ctrl-C drains it, the second stops it. Raises Exit after any."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    printer.say("  Ctrl-C drains and stops it; with -d it stays")
    changes = ModelChanges()
    presses, before = 0, {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        while not started.has_ended:
            try:
                with suppress(subprocess.TimeoutExpired):
                    started.process.wait(FOLLOW_S)
                for line in changes.lines(_model_items(started)):
                    printer.say(line)
            except KeyboardInterrupt:
                presses += 1
                notify(STOPPING)
                printer.say("\nstopping now" if presses > 1 else "\ndraining; Ctrl-C again stops now")
                with suppress(Unreachable), AdminClient.of(started.run) as admin:
                    admin.act("stop", **({"now": 1} if presses > 1 else {}))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if started.process.returncode:
        raise ending(started)
    printer.say(f"{started.spec.name} has stopped")
    if presses:
        raise typer.Exit(ExitCode.INTERRUPTED)


def _model_items(started: StartedGateway) -> list[dict[str, Any]]:
    """Return the models of a gateway, none while it does not answer."""
    with suppress(MstarError), AdminClient.of(started.run) as admin:
        items: list[dict[str, Any]] = admin.get("/v1/models")["items"]
        return items
    return []


@app.command("ls")
def ls(ctx: typer.Context, name: GatewayName = None) -> None:
    """List the models of a gateway with their states."""
    printer = Printer.of(ctx)
    with AdminClient.of(find_gateway(name)) as admin:
        items = admin.get("/v1/models")["items"]
    shown = items if printer.is_machine else [_row(item) for item in items]
    printer.items("model", shown, COLUMNS, empty="no models; start one with: mstarctl up MODEL")


def _row(item: dict[str, Any]) -> dict[str, Any]:
    return {
        **item,
        "count": len(item["replicas"]),
        "hosts": places_text(item.get("places", ())),
        "load": f"{item['running']}/{item['queued']}",
        "sleep": SLEEPS[item.get("can_sleep")],
        "note": item["reason"] or progress_text(item) or item.get("caution", ""),
        "names": ", ".join(item["aliases"]),
        "file": Path(item.get("config") or "").name,
        "urls": ", ".join(each["url"] for each in item["replicas"]),
    }


@app.command("add")
def add(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="NAME", help="the model's name for clients")],
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]",
            help="a model or deployment file, as `mstarctl up` takes it",
            autocompletion=target_names,
        ),
    ] = None,
    gateway: GatewayOption = None,
    keep: Annotated[str | None, typer.Option("--keep", help="always, `idle 10m` or on_demand")] = None,
    replicas: Annotated[str | None, typer.Option("--replicas", help="a number or a range such as 1..4")] = None,
    weights: Annotated[Path | None, typer.Option("--weights", metavar="DIR", help="folder of weights")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda")] = None,
    gpus: Annotated[str | None, typer.Option("--gpus", metavar="LIST", help="as `mstarctl up --gpus`")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a value")] = None,
    is_sleepable: Annotated[
        bool, typer.Option("--sleepable", help="its GPUs can give memory back in a sleep, as the key sleepable")
    ] = False,
    hosts: Annotated[
        list[str] | None, typer.Option("--on", metavar="HOST", help="host that may run it: local, or a context")
    ] = None,
    aliases: Annotated[list[str] | None, typer.Option("--alias", metavar="NAME", help="one more name")] = None,
    url: Annotated[str | None, typer.Option("--url", help="a running deployment, in place of TARGET")] = None,
) -> None:
    """Add a model to a running gateway, or change one. It is not written to the file."""
    printer = Printer.of(ctx)
    only_here(printer.options, "serve add")
    fields: dict[str, Any] = {
        "target": _absolute(target),
        "keep": keep,
        "replicas": replicas,
        "weights": None if weights is None else str(weights.expanduser().absolute()),
        "device": device,
        "gpus": gpus,
        "set": {each.key: each.value for each in map(parse_set, sets or ())} or None,
        "sleepable": is_sleepable or None,
        "hosts": hosts,
        "aliases": aliases,
        "url": url,
    }
    entry = {word: value for word, value in fields.items() if value is not None}
    if not entry.keys() & {"target", "url"}:
        raise UsageError("nothing to serve is given", hint="mstarctl serve add NAME TARGET, or --url URL")
    added = {model: read_entry(model, wrap(entry, "serve add"))}
    with AdminClient.of(find_gateway(gateway)) as admin:
        sleepable = admin.get("/v1/config")["serve"]["sleepable"]
        check_starts(ServeFile(models=added, sleepable=sleepable), printer)
        answer = admin.send("/v1/models", {"name": model, "entry": entry})
        printer.say(f"{admin.name}: serves {model}")
        if caution := answer.get("caution"):
            printer.warn(f"{model}: {caution}")
    if printer.is_machine:
        printer.item("model", answer, "")


def _absolute(target: str | None) -> str | None:
    """Return a target for a process with another working directory."""
    is_file = target is not None and target.endswith((".yaml", ".yml"))
    return str(Path(target or "").expanduser().absolute()) if is_file else target


@app.command("remove")
def remove(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="NAME", help="the model's name")],
    gateway: GatewayOption = None,
) -> None:
    """Remove a model from a running gateway. Requests that run on it finish."""
    printer = Printer.of(ctx)
    with AdminClient.of(find_gateway(gateway)) as admin:
        answer = admin.delete(f"/v1/models/{model}")
        printer.say(f"{admin.name}: no longer serves {model}")
    if printer.is_machine:
        printer.item("model", answer, "")


@app.command("agent")
def agent(ctx: typer.Context) -> None:
    """Run deployments of this host for a gateway of another host, which starts this through ssh."""
    from mstar_core.gateway.fleet.hosts.agent_main import run_agent  # no other command needs an event loop

    only_here(Printer.of(ctx).options, "serve agent")
    if sys.stdin.isatty():
        raise UsageError(
            "this command is started by gateways, through ssh",
            hint="hosts: [local, NAME] in serve.yaml, with NAME of mstarctl context",
        )
    run_agent(LocalHost(plans=KeptPlans(gateway_folder())))


@app.command("reload")
def reload(ctx: typer.Context, name: GatewayName = None) -> None:
    """Read serve.yaml and the certificate again; a file with faults changes nothing."""
    printer = Printer.of(ctx)
    with AdminClient.of(find_gateway(name)) as admin:
        path = admin.head().get("config")
        if path:
            check_starts(load_serve_file(Path(path)), printer)
        answer = admin.act("reload")
        printer.say(f"{admin.name}: read {answer['file'] or 'no file'}")
    if printer.is_machine:
        printer.item("gateway", answer, "")


@app.command("restart")
def restart(ctx: typer.Context, name: GatewayName = None) -> None:
    """Replace the gateway's worker by a new one; no connection is refused, and requests in flight finish."""
    printer = Printer.of(ctx)
    with AdminClient.of(find_gateway(name)) as admin:
        before = int(admin.head()["worker"])
        admin.act("restart")
        until = time.monotonic() + END_S
        while time.monotonic() < until:
            with suppress(Unreachable):
                worker = int(admin.head()["worker"])
                if worker != before:
                    printer.say(f"{admin.name}: a new worker serves, pid {worker}")
                    return
            time.sleep(POLL_S)
        raise Unreachable(f"{admin.name} has no new worker", f"after {END_S:.0f} s", "see its log: mstarctl ps -o json")


@app.command("down")
def down(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="optional if only one runs", autocompletion=gateway_names),
    ] = None,
    is_now: Annotated[bool, typer.Option("--now", help="do not wait for requests in flight")] = False,
    grace: Annotated[str, typer.Option("--grace", metavar="TIME", help="time limit for requests in flight")] = "30s",
) -> None:
    """Drain gateways and stop them, with the deployments that they have started."""
    printer = Printer.of(ctx)
    grace_s = 0.0 if is_now else parse_duration(grace, "--grace")
    runs = [find_gateway(name) for name in dict.fromkeys(names)] if names else [find_gateway(None)]
    asked = [(run, stop_gateway(run, printer, grace_s=grace_s, is_now=is_now)) for run in runs]
    items = [await_gateway(run, pid, printer, grace_s) for run, pid in asked]
    if printer.is_machine:
        printer.items("gateway", items, ())


def stop_gateway(run: RunDirectory, printer: Printer, *, grace_s: float, is_now: bool) -> int:
    """Make a gateway drain and stop, and return its pid at once. Raises NotFound if it has just ended."""
    pid = run.holder()
    if pid is None:
        raise NotFound(f"gateway {run.name!r} has just ended", hint="mstarctl ps", kind="gateway", name=run.name)
    printer.say(f"{run.name}: {'stopping' if is_now else 'draining, then stopping'}")
    with AdminClient.of(run) as admin:
        admin.act("stop", **({"now": 1} if is_now else {"grace": int(grace_s)}))
    return pid


def await_gateway(run: RunDirectory, pid: int, printer: Printer, grace_s: float) -> dict[str, Any]:
    """Wait for the end of a gateway that is stopping. Raises Unreachable if it does not end in time."""
    until = time.monotonic() + grace_s + END_S
    while run.holder() == pid:
        if time.monotonic() > until:
            raise Unreachable(f"{run.name} does not end", f"pid {pid} still runs", f"end it: kill -9 {pid}")
        time.sleep(POLL_S)
    printer.say(f"{run.name} has stopped")
    return {"name": run.name, "state": "stopped"}
