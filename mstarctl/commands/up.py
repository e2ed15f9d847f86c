"""`mstarctl up`: plan, start, show the start, and stay beside it or leave it running."""

from __future__ import annotations

import shlex
import shutil
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import typer

from mstar_core.errors import ConfigError, ExitCode, MstarError, Unreachable, UsageError, did_you_mean
from mstarctl.client import AdminClient
from mstarctl.client.deployments import read_outcome
from mstarctl.client.reach import only_here
from mstarctl.output import Printer
from mstarctl.output.durations import parse_duration
from mstarctl.start import options
from mstarctl.start.example import example_call
from mstarctl.start.launch import Started, failure_of, launch, wait_end, wait_ready
from mstarctl.start.plan import Planned, Wanted, make_planned
from mstarctl.start.progress import PlainView, SilentView, TerminalView, View, ready_line

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
SHOWN_EVENTS: Final = (
    "child.died", "child.restarting", "child.hangs", "child.stalled", "child.killed", "deployment.degraded",
    "deployment.ready", "deployment.draining", "deployment.unhealthy", "deployment.cut", "deployment.stopping",
)  # fmt: skip


def up(
    ctx: typer.Context,
    target: options.Target = None,
    config: options.ConfigOption = None,
    sets: options.Sets = None,
    weights: options.Weights = None,
    cache_dir: options.CacheDir = None,
    device: options.DeviceOption = None,
    gpus: options.Gpus = None,
    name: options.NameOption = None,
    is_detached: options.IsDetached = False,
    is_waiting: options.IsWaiting = True,
    is_dry: options.IsDry = False,
    stall: options.Stall = "120s",
    log_level: options.LogLevel = "INFO",
    run_root: options.RunRoot = None,
    host: options.Host = None,
    port: options.Port = None,
    api_key: options.ApiKey = None,
    api_key_file: options.ApiKeyFile = None,
    timeout: options.Timeout = None,
    bind_when_ready: options.BindWhenReady = False,
    strict_model: options.StrictModel = False,
    protocol: options.Protocol = "SHM",
    mooncake_port: options.MooncakePort = None,
    transfer_device: options.TransferDevice = None,
    upload_dir: options.UploadDir = None,
    nvtx: options.Nvtx = False,
    log_stats: options.LogStats = False,
    log_stats_file: options.LogStatsFile = None,
    remote_media: options.RemoteMedia = None,
    cors_origin: options.CorsOrigin = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    admin_group: options.AdminGroup = None,
    rust_frontend: options.RustFrontend = False,
    rust_frontend_bin: options.RustFrontendBin = None,
) -> None:
    """Start a deployment."""
    printer = Printer.of(ctx)
    only_here(printer.options, "up")
    refuse_second_front_end(is_asked=rust_frontend or rust_frontend_bin is not None)
    wanted = Wanted(
        target=target,
        config=config,
        name=name,
        host=host,
        port=port,
        gpus=gpus,
        device=device.value if device else None,
        weights=weights,
        cache_dir=cache_dir,
        sets=tuple(sets or ()),
        api_keys=api_keys(api_key, api_key_file, printer),
        timeout_s=None if timeout is None else parse_duration(timeout, "--timeout"),
        stall_s=parse_duration(stall, "--stall"),
        log_level=level_of(log_level),
        transport=protocol,
        run_root=run_root,
        upload_dir=upload_dir,
        log_stats=log_stats,
        stats_file=log_stats_file,
        bind_when_ready=bind_when_ready,
        remote_media=tuple(remote_media or ()),
        cors_origins=tuple(cors_origin or ()),
        tls_cert=tls_cert,
        tls_key=tls_key,
        strict_model=strict_model,
        admin_group=admin_group,
        mooncake_port=mooncake_port,
        transfer_device=transfer_device,
        nvtx=nvtx,
        argv=tuple(sys.argv[1:]),
    )
    planned = make_planned(wanted)
    for sentence in (*planned.spec.unused, *planned.spec.cautions):
        printer.warn(sentence)
    show_plan(planned, printer)
    if is_dry:
        show_dry(planned, printer)
        return
    started = launch(without_secrets(planned), planned.run)
    if is_detached:
        run_detached(started, planned, printer, is_waiting=is_waiting)
    else:
        run_attached(started, planned, printer)


def refuse_second_front_end(*, is_asked: bool) -> None:
    """Raises UsageError when another front end than ours is asked for."""
    if is_asked:
        raise UsageError(
            "--rust-frontend does not exist here", "there is one front end, and it is always used", "leave it out"
        )


def level_of(text: str) -> str:
    """The log level in capitals. Raises UsageError."""
    word = text.upper()
    if word not in LEVELS:
        raise UsageError(f"no log level {text!r}", hint=did_you_mean(word, LEVELS))
    return word


def api_keys(given: list[str] | None, file: Path | None, printer: Printer) -> tuple[str, ...]:
    """Keys of the command line and of the file. Raises ConfigError for a file that cannot be read or holds none.

    A file that others may read is used, and said.
    """
    keys = list(given or [])
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
            mode = stat.S_IMODE(file.stat().st_mode)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file} cannot be read", str(error), key="api_key_file") from error
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise ConfigError(f"--api-key-file {file} holds no key", hint="write one key a line", key="api_key_file")
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            path = shlex.quote(str(file))
            printer.warn(f"--api-key-file {file} has mode {mode:04o}: others may read its keys; chmod 600 {path}")
        keys += found
    if any(not key.strip() for key in keys):
        raise UsageError("an API key is empty", hint="give a key, or leave --api-key out")
    return tuple(keys)


def without_secrets(planned: Planned) -> Any:
    """The spec with the command line as typed, keys hidden."""
    import msgspec

    keys = set(planned.spec.api.api_keys)
    argv = tuple(
        "[hidden]" if word in keys or any(word == f"--api-key={key}" for key in keys) else word
        for word in planned.spec.argv
    )
    return msgspec.structs.replace(planned.spec, argv=argv)


def show_plan(planned: Planned, printer: Printer) -> None:
    """What will run where, and what the operator should know before it does."""
    spec, model = planned.spec, planned.model
    ranks = len(spec.plan.ranks)
    counts = f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {len(model.nodes)} nodes, {planned.walk_count} walks"
    printer.say(f"{spec.name}  plan ok: {counts}   ({planned.distribution}, {short_path(spec.config_file)})")
    requests = f"{spec.max_concurrent_requests} {'request' if spec.max_concurrent_requests == 1 else 'requests'}"
    devices = ", ".join(dict.fromkeys(rank.device for rank in spec.plan.ranks))
    printer.say(f"  device {devices} ({planned.devices.why}), up to {requests} at once")
    if spec.weights_source == "tiny" and model.notice:
        printer.warn(model.notice)
    if spec.api.host not in LOOPBACK and not spec.api.api_keys:
        host = f"[{spec.api.host}]" if ":" in spec.api.host else spec.api.host
        printer.warn(f"anyone who reaches {host}:{spec.api.port} may use it; see --api-key and --host 127.0.0.1")


def short_path(path: str | None) -> str:
    """A file with its folder: the whole path stands in `describe`."""
    return "no file" if path is None else "/".join(Path(path).parts[-2:])


def show_dry(planned: Planned, printer: Printer) -> None:
    """The plan as data."""
    spec = planned.spec
    item = {
        "name": spec.name, "model": spec.model, "plugin": planned.distribution, "config": spec.config_file,
        "weights": spec.weights_source, "folder": spec.folder, "host": spec.api.host, "port": spec.api.port,
        "run_dir": spec.run_dir, "max_seq_len": spec.max_seq_len,
        "max_concurrent_requests": spec.max_concurrent_requests, "kv_cache": spec.kv_cache,
        "ranks": [{"rank": r.rank, "device": r.device, "nodes": list(r.nodes)} for r in spec.plan.ranks],
    }  # fmt: skip
    lines = [f"rank {r.rank}  {r.device}  {' '.join(r.nodes)}" for r in spec.plan.ranks]
    lines += [
        f"api     {spec.api.host}:{spec.api.port}",
        f"weights {spec.folder or spec.weights_source}",
        f"run dir {spec.run_dir}",
    ]
    printer.item("deployment", item, lines)


def view_of(printer: Printer) -> View:
    """How this start is shown: in place on a terminal, line by line elsewhere, not at all with -q."""
    if printer.options.quiet:
        return SilentView()
    if sys.stderr.isatty():
        return TerminalView(sys.stderr, shutil.get_terminal_size().columns)
    return PlainView(sys.stderr)


def run_detached(started: Started, planned: Planned, printer: Printer, *, is_waiting: bool) -> None:
    """Return when it is ready, or as soon as its supervisor answers. Ctrl-C stops the waiting only."""
    try:
        with _interruptible():
            snapshot = wait_ready(started, view_of(printer).show, until_known=not is_waiting)
    except KeyboardInterrupt:
        printer.say(f"\n{started.spec.name} goes on starting, pid {started.process.pid}")
        _say_next(planned, printer)
        raise
    except MstarError as error:
        _tell_followers(started, printer)
        raise error from None
    if is_waiting:
        _say_ready(snapshot, planned, printer)
    else:
        printer.say(f"{started.spec.name} is starting, pid {started.process.pid}")
        _say_next(planned, printer)
    _data(snapshot, printer)


def run_attached(started: Started, planned: Planned, printer: Printer) -> None:
    """Stay until it ends. The first Ctrl-C drains it, the second stops it."""
    presses, seen = 0, 0
    is_ready = False
    with _interruptible():
        while True:
            try:
                if not is_ready and presses == 0:
                    snapshot = wait_ready(started, view_of(printer).show)
                    is_ready, seen = True, int(snapshot["deployment"]["last_event"])
                    _say_ready(snapshot, planned, printer)
                    printer.say("  Ctrl-C drains and stops it")
                for event in _events(started, seen):
                    seen = int(event["n"])
                    _tell(event, printer)
                wait_end(started)
                break
            except KeyboardInterrupt:
                presses += 1
                _ask_stop(started, printer, presses)
    outcome = read_outcome(started.log_dir)
    if outcome is None or outcome.get("exit_code"):
        _tell_followers(started, printer)
        raise failure_of(started)
    printer.say(f"{started.spec.name} has stopped")
    if presses > 1:
        raise typer.Exit(ExitCode.INTERRUPTED)


def _ask_stop(started: Started, printer: Printer, presses: int) -> None:
    now = presses > 1
    printer.say(f"\n{'stopping now' if now else 'draining: requests in flight are finished; Ctrl-C again stops now'}")
    try:
        with AdminClient.of(started.run) as admin:
            admin.act("stop", **({"now": 1} if now else {}))
    except Unreachable:  # its socket is not open yet, or no longer: the signal says the same
        if not started.has_ended:
            started.process.send_signal(signal.SIGTERM)


def _events(started: Started, seen: int) -> Iterator[dict[str, Any]]:
    """Events after number `seen`, until the supervisor has ended."""
    while not started.has_ended:
        try:
            with AdminClient.of(started.run) as admin:
                for event in admin.lines("/v1/events", follow=1, since=seen):
                    if event is not None:
                        seen = int(event["n"])
                        yield event
        except Unreachable:
            _pause(started)


def _pause(started: Started) -> None:
    import subprocess

    try:
        started.process.wait(0.2)
    except subprocess.TimeoutExpired:
        return


def _tell(event: dict[str, Any], printer: Printer) -> None:
    kind = str(event["type"])
    if kind not in SHOWN_EVENTS:
        return
    facts = " ".join(
        f"{key}={value}" for key, value in event.items() if key not in ("n", "time", "type") and value != ""
    )
    printer.say(f"{kind}  {facts}".rstrip())


def _tell_followers(started: Started, printer: Printer) -> None:
    outcome = read_outcome(started.log_dir) or {}
    for line in outcome.get("followed_by", []):
        printer.say(f"  followed by {line}")


def _say_ready(snapshot: dict[str, Any], planned: Planned, printer: Printer) -> None:
    printer.say(ready_line(snapshot))
    printer.say(f"  try:   {_prefix(planned)}mstarctl call {planned.spec.name} {example_call(planned.model)}")
    _say_next(planned, printer)


def _say_next(planned: Planned, printer: Printer) -> None:
    prefix, name = _prefix(planned), planned.spec.name
    printer.say(f"  watch: {prefix}mstarctl top {name}          stop: {prefix}mstarctl down {name}")


def _prefix(planned: Planned) -> str:
    """What other commands need in front to find the deployment."""
    root = planned.run.path.parent
    return "" if root == _root() else f"MSTAR_RUNTIME_DIR={shlex.quote(str(root))} "


def _root() -> Path:
    from mstar_core.host.run_dir import runtime_root

    return runtime_root()


def _data(snapshot: dict[str, Any], printer: Printer) -> None:
    if printer.is_machine:
        head = snapshot["deployment"]
        printer.item("deployment", {**head, "children": list(snapshot["children"].values())}, "")


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and a closed terminal act like Ctrl-C inside the block."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
