"""`mstarctl up`: plans a deployment, starts it, shows its progress, and stays attached or returns."""

from __future__ import annotations

import os
import select
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec
import typer

from mstar_core.config.deployment import HostPlan, RankPlan
from mstar_core.errors import ExitCode, MstarError, Unreachable, UsageError
from mstar_core.host.run_dir import runtime_root
from mstarctl.client import AdminClient
from mstarctl.client.deployments import forget, read_outcome
from mstarctl.client.reach import only_here
from mstarctl.objects.deployment import held_text, places
from mstarctl.output import Printer
from mstarctl.output.units import counted
from mstarctl.start.example import example_call
from mstarctl.start.launch import Started, failure_of, launch, wait_end, wait_named, wait_ready
from mstarctl.start.nearest import with_nearest
from mstarctl.start.options import UpOptions, up_signature
from mstarctl.start.plan import Planned, make_planned
from mstarctl.start.progress import ready_line, view_of
from mstarctl.start.service.notify import READY, STOPPING, notify

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOWN_EVENTS: Final = (
    "child.died",
    "child.restarting",
    "child.hangs",
    "child.stalled",
    "child.killed",
    "deployment.degraded",
    "deployment.ready",
    "deployment.replaced",
    "deployment.draining",
    "deployment.unhealthy",
    "deployment.cut",
    "deployment.stopping",
)


def up(ctx: typer.Context, **flags: Any) -> None:
    """Start a deployment."""
    printer = Printer.of(ctx)
    only_here(printer.options, "up")
    options = UpOptions(**flags)
    try:
        start(options, printer)
    except MstarError as error:
        raise with_nearest(error, options) from error.__cause__


vars(up)["__signature__"] = up_signature()


def start(options: UpOptions, printer: Printer) -> None:
    """Plan and start a deployment. Raises the MstarError that says why it cannot start."""
    keys = typed_keys(options.api_key)
    planned = make_planned(options, api_keys=keys, argv=without_secrets(sys.argv[1:], keys))
    warn_of_mode(planned.spec.api.api_key_file, "--api-key-file", printer)
    warn_of_mode(planned.spec.api.metrics_key_file, "--metrics-key-file", printer)
    for server in planned.spec.api.realtime_ice_servers:
        warn_of_mode(server.credential_file, "credential_file", printer)
        warn_of_mode(server.secret_file, "secret_file", printer)
    for sentence in (*planned.spec.unused, *planned.spec.cautions):
        printer.warn(sentence)
    show_plan(planned, printer)
    if options.is_dry:
        show_dry(planned, printer)
        return
    if planned.spec.stop_first:
        printer.say(f"{planned.spec.name} drains and stops first; new connections wait")
    with _ctrl_c_held() as presses:
        started = launch(planned.spec, planned.run)
    if options.is_detached:
        run_detached(started, planned, printer, is_waiting=options.is_waiting and not presses)
        if presses:
            raise typer.Exit(ExitCode.INTERRUPTED)
    else:
        run_attached(started, planned, printer, len(presses))


def typed_keys(keys: list[str] | None) -> tuple[str, ...]:
    """Return the keys of the command line. Raises UsageError for an empty one."""
    if any(not key.strip() for key in keys or ()):
        raise UsageError("an API key is empty", hint="give a key, or omit --api-key")
    return tuple(keys or ())


def warn_of_mode(file: str | None, option: str, printer: Printer) -> None:
    """Warn of a file of keys that other users may read."""
    if file is None:
        return
    mode = stat.S_IMODE(Path(file).stat().st_mode)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        hint = f"chmod 600 {shlex.quote(file)}"
        printer.warn(f"{option} {file} has mode {mode:04o}: other users may read it; {hint}")


def without_secrets(argv: Sequence[str], keys: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with its API keys hidden."""
    secrets = {*keys, *(f"--api-key={key}" for key in keys)}
    return tuple("[hidden]" if word in secrets else word for word in argv)


def show_plan(planned: Planned, printer: Printer) -> None:
    """Print the placement, and warnings before the start."""
    spec, model = planned.spec, planned.model
    sizes = {"rank": len(spec.plan.ranks), "node": len(model.nodes), "walk": planned.walk_count}
    counts = ", ".join(counted(size, noun) for noun, size in sizes.items())
    name, ok = printer.paint(spec.name, "strong", sys.stderr), printer.paint("plan ok", "ok", sys.stderr)
    printer.say(f"{name}  {ok}: {counts}   ({planned.distribution}, {short_path(spec.config_file)})")
    devices = ", ".join(dict.fromkeys(place_text(rank, spec.hosts) for rank in spec.plan.ranks))
    printer.say(f"  device {devices} ({planned.devices.why})")
    why = spec.source("max_concurrent_requests")
    printer.say(f"  up to {counted(spec.max_concurrent_requests, 'request')} at once ({why})")
    if notice := model.notice_of(spec.weights_source):
        printer.warn(notice)
    if spec.api.host not in LOOPBACK and not spec.api.api_keys:
        host = f"[{spec.api.host}]" if ":" in spec.api.host else spec.api.host
        printer.warn(
            f"{host}:{spec.api.port} is open to every host that can reach it; see --api-key and --host 127.0.0.1"
        )


def short_path(path: str | None) -> str:
    """Return a file with its directory; `describe` shows the whole path."""
    return "no file" if path is None else "/".join(Path(path).parts[-2:])


def place_text(rank: RankPlan, hosts: Sequence[HostPlan]) -> str:
    """Return the device of a rank, after the name of its host if the deployment has several: `gpu-b cuda:0`."""
    title = next((host.title for host in hosts if host.name == rank.host), "")
    return f"{title} {rank.device}".lstrip()


def rank_item(rank: RankPlan, hosts: Sequence[HostPlan]) -> dict[str, Any]:
    titles = {host.name: host.title for host in hosts}
    item = {"rank": rank.rank, "device": rank.device, "nodes": list(rank.nodes)}
    if titles:
        item["host"] = titles[rank.host]
    return item | {"follows": list(rank.follows)} if rank.follows else item


def show_dry(planned: Planned, printer: Printer) -> None:
    """Print the plan as data."""
    spec = planned.spec
    item = {
        "name": spec.name,
        "model": spec.model,
        "plugin": planned.distribution,
        "config": spec.config_file,
        "weights": spec.weights_source,
        "folder": spec.folder,
        "host": spec.api.host,
        "port": spec.api.port,
        "run_dir": spec.run_dir,
        "max_seq_len": spec.max_seq_len,
        "max_concurrent_requests": spec.max_concurrent_requests,
        "kv_cache": spec.kv_cache,
        "ranks": [rank_item(rank, spec.hosts) for rank in spec.plan.ranks],
        "nodes": places(spec.plan),
    }
    if spec.hosts:
        item["hosts"] = [{"name": host.title, "address": host.address} for host in spec.hosts]
    lines = [
        f"rank {r.rank}  {place_text(r, spec.hosts)}  {held_text(msgspec.structs.asdict(r))}" for r in spec.plan.ranks
    ]
    # Placements by walk, such as prompts on one rank and decoding on another, and replicas.
    shared = {place.node for place in spec.plan.placements if place.walks or len(place.replicas) > 1}
    lines += [f"{node}: {where}" for node, where in places(spec.plan).items() if node in shared]
    lines += [
        f"api     {spec.api.host}:{spec.api.port}",
        f"weights {spec.folder or spec.weights_source}",
        f"run dir {spec.run_dir}",
    ]
    if spec.hosts:
        lines.insert(-3, f"hosts   {', '.join(f'{host.title} {host.address}' for host in spec.hosts)}")
    printer.item("deployment", item, lines)


def run_detached(started: Started, planned: Planned, printer: Printer, *, is_waiting: bool) -> None:
    """Return when the deployment is ready, or as soon as its supervisor answers. Ctrl-C ends only the wait."""
    try:
        with _interruptible():
            snapshot = wait_ready(started, view_of(printer.options).show, until_known=not is_waiting)
            if is_waiting and started.spec.replaces:
                if not started.spec.stop_first:
                    printer.say(f"the new {started.spec.name} serves; the old one finishes its requests")
                wait_named(started)
    except KeyboardInterrupt:
        printer.say(f"\n{started.spec.name} is still starting, pid {started.process.pid}")
        _say_next(planned, printer)
        raise
    except MstarError as error:
        _say_followers(started, printer)
        raise error from None
    if is_waiting:
        _say_ready(snapshot, planned, printer)
    else:
        printer.say(f"{started.spec.name} is starting, pid {started.process.pid}")
        _say_next(planned, printer)
    _data(snapshot, printer)


def run_attached(started: Started, planned: Planned, printer: Printer, presses: int = 0) -> None:
    """Stay until the deployment ends. The first Ctrl-C drains it, or ends its start; the second stops it.

    A terminal that is closed, or a reader such as `head` that has left, acts like Ctrl-C. presses: of Ctrl-C before.
    Raises Exit with the status of an interrupted program after any.
    """
    seen, is_ready = 0, False
    with _interruptible():
        if presses:
            _ask_stop(started, printer, presses, is_ready=False)
        while True:
            try:
                if not is_ready and presses == 0:
                    snapshot = wait_ready(started, view_of(printer.options).show)
                    is_ready, seen = True, int(snapshot["deployment"]["last_event"])
                    _say_ready(snapshot, planned, printer)
                    notify(READY, f"serves on {planned.spec.api.host}:{planned.spec.api.port}")
                    printer.say("  Ctrl-C drains and stops it, and so does closing this terminal; with -d it stays")
                for event in _events(started, seen):
                    seen = int(event["n"])
                    _say_event(event, printer)
                wait_end(started)
                break
            except (KeyboardInterrupt, BrokenPipeError):
                presses += 1
                _ask_stop(started, printer, presses, is_ready=is_ready)
    outcome = read_outcome(started.log_dir)
    if presses and not is_ready:
        started.run.discard()
        forget(started.log_dir)
        printer.say(f"the start of {started.spec.name} was interrupted; nothing is left of it")
        raise typer.Exit(ExitCode.INTERRUPTED)
    if outcome is None or outcome.get("exit_code"):
        _say_followers(started, printer)
        raise failure_of(started)
    printer.say(f"{started.spec.name} has stopped")
    if presses:
        raise typer.Exit(ExitCode.INTERRUPTED)


def _ask_stop(started: Started, printer: Printer, presses: int, *, is_ready: bool) -> None:
    now = presses > 1 or not is_ready
    notify(STOPPING)
    _keep_stderr()
    if is_ready:
        line = "stopping now" if now else "draining: requests in flight finish first; Ctrl-C again stops now"
        printer.say(f"\n{line}")
    try:
        with AdminClient.of(started.run) as admin:
            admin.act("stop", **({"now": 1} if now else {}))
    except Unreachable:  # the socket is not open yet, or is closed; the signal has the same effect
        if not started.has_ended:
            started.process.send_signal(signal.SIGTERM)


def _keep_stderr() -> None:
    """Send narration to nowhere if the reader of stderr is gone, so that the stop itself does not fail."""
    if not has_reader(2):
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 2)


def has_reader(fd: int) -> bool:
    """Return whether what is written to a descriptor can be read: false for a closed pipe and a closed terminal."""
    poll = select.poll()
    poll.register(fd, 0)
    return not any(events & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, events in poll.poll(0))


def _events(started: Started, seen: int) -> Iterator[dict[str, Any]]:
    """Yield events after number `seen`, until the supervisor has ended."""
    while not started.has_ended:
        try:
            with AdminClient.of(started.run) as admin:
                for event in admin.lines("/v1/events", follow=1, since=seen):
                    if not has_reader(2) and stat.S_ISFIFO(os.fstat(2).st_mode):
                        raise BrokenPipeError
                    if event is not None:
                        seen = int(event["n"])
                        yield event
        except Unreachable:
            _pause(started)


def _pause(started: Started) -> None:
    with suppress(subprocess.TimeoutExpired):
        started.process.wait(0.2)


def _say_event(event: dict[str, Any], printer: Printer) -> None:
    kind = str(event["type"])
    if kind not in SHOWN_EVENTS:
        return
    facts = " ".join(
        f"{key}={value}" for key, value in event.items() if key not in ("n", "time", "type") and value != ""
    )
    printer.say(f"{kind}  {facts}".rstrip())


def _say_followers(started: Started, printer: Printer) -> None:
    outcome = read_outcome(started.log_dir) or {}
    for line in outcome.get("followed_by", []):
        printer.say(f"  followed by {line}")


def _say_ready(snapshot: dict[str, Any], planned: Planned, printer: Printer) -> None:
    word, _, rest = ready_line(snapshot).partition(" ")
    printer.say(f"{printer.paint(word, 'ok', sys.stderr)} {rest}")
    folder = None if planned.spec.folder is None else Path(planned.spec.folder)
    if words := example_call(planned.model, planned.spec.weights_source, folder):
        example = f"{_prefix(planned)}mstarctl call {planned.spec.name} {words}"
        printer.say(f"  try:   {printer.paint(example, 'key', sys.stderr)}")
    _say_next(planned, printer)


def _say_next(planned: Planned, printer: Printer) -> None:
    prefix, name = _prefix(planned), planned.spec.name
    printer.say(f"  watch: {prefix}mstarctl top {name}          stop: {prefix}mstarctl down {name}")


def _prefix(planned: Planned) -> str:
    """Return the prefix that other commands need to find the deployment."""
    root = planned.run.path.parent
    return "" if root == runtime_root() else f"MSTAR_RUNTIME_DIR={shlex.quote(str(root))} "


def _data(snapshot: dict[str, Any], printer: Printer) -> None:
    if printer.is_machine:
        head = snapshot["deployment"]
        printer.item("deployment", {**head, "children": list(snapshot["children"].values())}, "")


@contextmanager
def _ctrl_c_held() -> Iterator[list[int]]:
    """Hold back Ctrl-C inside the block, so that no process is started whose pid is then lost. Yields the signals."""
    seen: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: seen.append(number)) for number in ENDING}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Handle SIGTERM and a closed terminal like Ctrl-C inside the block."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # An ignored signal stays ignored: `nohup mstarctl up` survives its terminal.
    heeded = [number for number in ENDING[1:] if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
