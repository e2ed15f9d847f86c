"""Main of the supervisor process: locks the run directory, opens mailbox and admin socket, runs the deployment."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

import zmq

from mstar_core.admin.access import bind_admin
from mstar_core.admin.server import AdminServer
from mstar_core.cluster.placer import Placer
from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import ConfigError, ExitCode, MstarError
from mstar_core.host.gpu_locks import acquire_gpus, release
from mstar_core.host.groups import group_id
from mstar_core.host.leftovers import end_leftovers
from mstar_core.host.log_starts import DAY_S, prune_starts
from mstar_core.host.ports import check_port, one_start, port_claimant
from mstar_core.host.run_dir import RunDirectory
from mstar_core.messages.wire import WireCodec
from mstar_core.process.logs import start_logging
from mstar_core.process.system import give_back_freed_memory, raise_descriptor_limit
from mstar_core.supervisor.child import DEFAULT_PACE, Kinds, Pace, child_kinds, standby_kind, write_spec
from mstar_core.supervisor.deaths import outcome, write_outcome
from mstar_core.supervisor.hosts.hosts import RemoteLink
from mstar_core.supervisor.listener import PortListener
from mstar_core.supervisor.log_file import STATS_FILE, LogFile, LogStream, StatsLog
from mstar_core.supervisor.operations.device_shares import DeviceShares
from mstar_core.supervisor.succession.predecessor import HandoverServer
from mstar_core.supervisor.succession.successor import Takeover
from mstar_core.supervisor.succession.wire import KIND
from mstar_core.supervisor.supervisor import Supervisor
from mstar_core.targets import load_target
from mstar_core.transport import KEYS_FILE, Courier, Mailbox, RemoteAccess, mailbox_endpoint, make_keys, write_keys

log = logging.getLogger(__name__)

NAME = "supervisor"
RAY_PLACER: Final = "mstar_core.cluster.ray_placer:RayPlacer"


def ray_placer(spec: DeploymentSpec) -> Placer:
    """Return the placer of a deployment on a Ray cluster."""
    placer: Placer = load_target(RAY_PLACER)(spec.ray.address or "auto", spec.name)
    return placer


def main(
    argv: list[str] | None = None,
    kinds: Kinds = child_kinds,
    pace: Pace = DEFAULT_PACE,
    placer: Callable[[DeploymentSpec], Placer] = ray_placer,
) -> None:
    """Run `python -m mstar_core.supervisor SPEC` and exit with the deployment's code.

    SPEC: the file that `up` wrote for this start; removed once read, because it may contain keys. kinds: the children.
    pace: intervals and limits of restarts. placer: of a deployment on several hosts.
    """
    parser = argparse.ArgumentParser(prog="mstar_core.supervisor")
    parser.add_argument("spec", type=Path)
    args = parser.parse_args(argv)
    spec = DeploymentSpec.load(args.spec)
    run = RunDirectory(Path(spec.run_dir))
    if args.spec.resolve() != run.spec.resolve():
        args.spec.unlink(missing_ok=True)
    log_dir = Path(spec.log_dir)
    with closing(LogFile(log_dir / f"{NAME}.log", spec.logs)) as file:
        start_logging(NAME, spec.log_level, secrets=spec.api.secrets, stream=LogStream(file))
        code, record = _serve(spec, run, kinds, file, pace, placer)
        write_outcome(log_dir, {**identity(spec), **record})
    sys.exit(int(code))


def identity(spec: DeploymentSpec) -> dict[str, object]:
    """Return the facts of a deployment that its outcome keeps."""
    return {
        "name": spec.name,
        "model": spec.model,
        "weights": spec.weights_source,
        "ranks": len(spec.plan.ranks),
        "host": spec.api.host,
        "port": spec.api.port,
        "config": spec.config_file,
        "ended_at": round(time.time(), 3),
    }


def _serve(
    spec: DeploymentSpec,
    run: RunDirectory,
    kinds: Kinds,
    own_log: LogFile,
    pace: Pace,
    placer: Callable[[DeploymentSpec], Placer],
) -> tuple[ExitCode, dict[str, object]]:
    try:
        lock = run.acquire()
    except (MstarError, OSError) as error:
        refused = error if isinstance(error, MstarError) else _unwritable(run, error)
        return refused.exit_code, _failed(refused)
    locks: dict[str, int] = {}
    listener = PortListener(spec.api.host, spec.api.port)
    takeover: Takeover | None = None
    try:
        end_earlier(run)
        if spec.replaces:
            takeover = Takeover.begin(spec)
            listener, locks = takeover.listener, {**takeover.locks}
            prepare(run, spec)
            run.announce()
        else:
            with one_start(run):
                claimant = port_claimant(spec.api.host, spec.api.port, run)
                prepare(run, spec)
            check_port(spec.api.host, spec.api.port, claimant)
            listener.open()
        missing = {device: key for device, key in spec.gpus.items() if key not in locks}
        locks |= acquire_gpus(missing, spec.name, spec.claims)
        admin = bind_admin(run.admin_socket, admin_gid(spec))
        return asyncio.run(_run(spec, run, admin, listener, kinds, own_log, pace, locks, takeover, placer))
    except MstarError as error:
        log.error("%s", error)
        return ExitCode.START_FAILED if error.exit_code is ExitCode.INTERNAL else error.exit_code, _failed(error)
    except Exception as error:  # isolation boundary: the outcome must name the cause
        log.exception("the supervisor failed")
        broken = MstarError("the supervisor failed", f"{type(error).__name__}: {error}", "its log has the traceback")
        return ExitCode.INTERNAL, _failed(broken)
    finally:
        listener.close()
        release(locks)  # first: a deployment whose run directory is gone has ended, and its memory is free
        run.remove()
        shutil.rmtree(spec.uploads, ignore_errors=True)
        if takeover is not None:
            takeover.close()
        os.close(lock)


def end_earlier(run: RunDirectory) -> None:
    """End what an earlier start left: children of a killed supervisor that have not noticed it yet."""
    ended = end_leftovers(run)
    if ended:
        log.warning("ended %d processes of an earlier start: %s", len(ended), ", ".join(map(str, ended)))


def admin_gid(spec: DeploymentSpec) -> int | None:
    """Return the group that may read the admin socket. Raises ConfigError if it does not exist."""
    return None if spec.admin_group is None else group_id(spec.admin_group)


def prepare(run: RunDirectory, spec: DeploymentSpec) -> None:
    """Clear the run directory and write the spec to it. Raises ConfigError."""
    try:
        run.clean()
        spec.uploads.mkdir(mode=0o700, exist_ok=True)
        write_spec(run, spec)
    except OSError as error:
        raise _unwritable(run, error) from error


def _unwritable(run: RunDirectory, error: OSError) -> ConfigError:
    hint = "set MSTAR_RUNTIME_DIR to a folder that you own"
    return ConfigError("the run directory cannot be written", f"{run.path}: {error.strerror}", hint)


def _failed(error: MstarError) -> dict[str, object]:
    record = {
        "name": NAME,
        "message": error.title,
        "detail": error.detail,
        "hint": error.hint,
        "code": error.code,
        "monotonic": time.monotonic(),
        "time": time.time(),
    }
    return outcome([record], error.exit_code, error.title)


def prune_daily(loop: asyncio.AbstractEventLoop, spec: DeploymentSpec) -> None:
    """Remove the logs of earlier starts that have become too old, every day while the deployment runs."""
    root = Path(spec.log_dir).parent
    try:
        prune_starts(root, keep=spec.logs.keep_starts, max_days=spec.logs.max_days, now=time.time())
    except OSError as error:
        log.warning("old logs cannot be removed: %s: %s", root, error.strerror)
    loop.call_later(DAY_S, prune_daily, loop, spec)


def reload_for_signal(supervisor: Supervisor) -> None:
    """Read keys and certificate again for SIGHUP; an invalid file is logged and changes nothing."""
    try:
        supervisor.reload()
    except MstarError as error:
        log.error("the keys and the certificate were not reloaded: %s", error)


def remote_access(spec: DeploymentSpec, run: RunDirectory) -> RemoteAccess | None:
    """Make the keys of a deployment on a cluster, for its processes too. Returns None for one without a cluster."""
    if not spec.hosts:
        return None
    keys = make_keys()
    write_keys(run.path / KEYS_FILE, keys)
    return RemoteAccess(spec.address, keys, spec.ray.port_range)


async def _run(
    spec: DeploymentSpec,
    run: RunDirectory,
    admin: socket.socket,
    listener: PortListener,
    kinds: Kinds,
    own_log: LogFile,
    pace: Pace,
    locks: Mapping[str, int],
    takeover: Takeover | None,
    placer: Callable[[DeploymentSpec], Placer],
) -> tuple[ExitCode, dict[str, object]]:
    raise_descriptor_limit()  # each connection of a client is kept with a memory file
    give_back_freed_memory()
    loop = asyncio.get_running_loop()
    codec = WireCodec(NAME, 0)
    endpoint = mailbox_endpoint(run.ipc, NAME, 0)
    access = remote_access(spec, run)
    with (
        zmq.Context() as context,
        Courier(context, codec, keys=None if access is None else access.keys) as courier,
        Mailbox(context, endpoint, codec, remote=access) as mailbox,
    ):
        remote = None
        if access is not None:
            remote = RemoteLink(endpoint=mailbox.remote_endpoint, keys=access.keys, placer=placer(spec))
        supervisor = Supervisor(
            spec, run, courier, endpoint, kinds, pace, listener=listener, standby=standby_kind(spec), remote=remote
        )
        supervisor.logs[NAME] = own_log
        supervisor.sleep.ledger = DeviceShares(spec, locks)
        mailbox.on_break = supervisor.on_break
        mailbox.attach(loop, supervisor.on_batch)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: supervisor.stop(reason="asked to stop by a signal"))
        loop.add_signal_handler(signal.SIGHUP, reload_for_signal, supervisor)
        requests = supervisor.publisher.requests
        if spec.log_stats:
            path = Path(spec.stats_file) if spec.stats_file else Path(spec.log_dir) / STATS_FILE
            requests.on_end.append(StatsLog(path, requests, spec.logs).ended)
        prune_daily(loop, spec)
        server = AdminServer(supervisor, admin, admin_gid(spec))
        await server.start()
        claims = HandoverServer(
            supervisor, bind_admin(run.handover_socket, kind=KIND), lambda: {**locks, **supervisor.operations.locks()}
        )
        claims.start()
        try:
            code = await supervisor.run(takeover)
        finally:
            await claims.stop()
            requests.settle(math.inf)  # report requests that ended in the last moment too
            await server.stop()
            mailbox.detach()
        return code, supervisor.record()
