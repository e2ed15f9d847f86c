"""Deployments of this host: running, stale, or ended with a cause. Read from directories and admin sockets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mstar_core.config.name import check_name
from mstar_core.errors import ExitCode, NotFound, Unreachable, did_you_mean
from mstar_core.host.run_dir import RunDirectory, deployments
from mstarctl.client.admin import AdminClient
from mstarctl.client.log_dirs import state_root

OUTCOME: Final = "outcome.json"
SUPERVISOR: Final = "supervisor"
REMEMBERED_S: Final = 24 * 3600.0
"""Time for which `ps` lists a failed deployment, unless it is forgotten before."""

FORGOTTEN: Final = "forgotten"
"""Empty file in the log folder of a start that `ps` no longer lists."""

ANSWER_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One deployment. snapshot: of its supervisor, while it runs. outcome: of its last start, after its end.

    run: None on another host. A deployment with a snapshot runs, whatever its pid is there.
    """

    name: str
    state: str
    run: RunDirectory | None = None
    pid: int | None = None
    snapshot: dict[str, Any] = field(default_factory=dict)
    outcome: dict[str, Any] = field(default_factory=dict)
    log_dir: Path | None = None

    @property
    def is_running(self) -> bool:
        return self.pid is not None or bool(self.snapshot)

    @property
    def head(self) -> dict[str, Any]:
        """The deployment's part of the snapshot."""
        head: dict[str, Any] = self.snapshot.get("deployment", {})
        return head

    @property
    def children(self) -> list[dict[str, Any]]:
        """Its processes without the supervisor."""
        return [child for name, child in self.snapshot.get("children", {}).items() if name != SUPERVISOR]

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return list(self.snapshot.get("ranks", {}).values())

    @property
    def cause(self) -> dict[str, Any] | None:
        """The failure that it suffers from or ended with, if there is one."""
        cause = self.head.get("cause") if self.is_running else self.outcome.get("cause")
        return cause if isinstance(cause, dict) else None

    @property
    def last_failure(self) -> dict[str, Any] | None:
        """The last failure of a running deployment, also one that it has recovered from."""
        failure = self.head.get("last_failure")
        return failure if isinstance(failure, dict) else None

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The newest failures of a running deployment, oldest first. An older supervisor reports only the last one."""
        failures: list[dict[str, Any]] = self.head.get("failures") or []
        return failures or ([] if self.last_failure is None else [self.last_failure])


def known_deployments() -> list[Known]:
    """Return running and stale deployments, and those whose last start failed within a day, by name."""
    by_name = {run.name: known(run) for run in deployments()}
    for name in _logged_names():
        if name not in by_name:
            last = last_start(name)
            if last is not None and _is_listed(last):
                by_name[name] = last
    return [by_name[name] for name in sorted(by_name)]


def _is_listed(last: Known) -> bool:
    is_forgotten = last.log_dir is not None and (last.log_dir / FORGOTTEN).exists()
    return last.state == "failed" and not is_forgotten and time.time() - _ended_at(last) < REMEMBERED_S


def forget(log_dir: Path) -> None:
    """Remove an ended start from the list of `ps`. Its logs stay."""
    with suppress(OSError):
        (log_dir / FORGOTTEN).touch()


def find_known(name: str) -> Known:
    """Return the deployment called `name`, even after its end. Raises NotFound with the nearest name."""
    run = RunDirectory.of(name)
    if run.spec.is_file():
        return known(run)
    last = last_start(name)
    if last is None:
        names = {run.name for run in deployments()} | set(_logged_names())
        raise NotFound(f"no deployment {name!r}", hint=did_you_mean(name, names), kind="deployment", name=name)
    return last


def find_running(name: str | None) -> RunDirectory:
    """Return the running deployment called `name`, or the only one. Raises NotFound with the nearest name."""
    live = {run.name: run for run in deployments() if run.holder() is not None}
    if name is None:
        if len(live) == 1:
            return next(iter(live.values()))
        hint = "start one with: mstarctl up MODEL" if not live else f"name one of: {', '.join(sorted(live))}"
        title = "no deployment is running" if not live else f"{len(live)} deployments are running"
        raise NotFound(title, hint=hint, kind="deployment", name="")
    if name not in live:
        hint = did_you_mean(name, live) if live else "start one with: mstarctl up MODEL"
        raise NotFound(f"no deployment {name!r} is running", hint=hint, kind="deployment", name=name)
    return live[name]


def known(run: RunDirectory) -> Known:
    """Return the deployment of a run directory. A supervisor that does not answer gives the state `silent`."""
    pid = run.holder()
    if pid is None:
        return Known(name=run.name, state="stale", run=run)
    try:
        with AdminClient.of(run, ANSWER_S) as admin:
            snapshot = admin.snapshot(("children", "ranks", "edges", "hosts"))
    except Unreachable:
        return Known(name=run.name, state="silent", run=run, pid=pid)
    head = snapshot["deployment"]
    return Known(
        name=run.name, state=str(head["state"]), run=run, pid=pid, snapshot=snapshot, log_dir=Path(head["log_dir"])
    )


def last_start(name: str) -> Known | None:
    """Return the last start of a deployment that does not run, None if there was none."""
    folder = last_log_dir(name)
    if folder is None:
        return None
    outcome = read_outcome(folder)
    if outcome is None:  # its supervisor was killed before it could write it
        outcome = {
            "name": name,
            "exit_code": int(ExitCode.INTERNAL),
            "reason": "its supervisor was killed",
            "cause": None,
        }
    state = "stopped" if outcome.get("exit_code") == ExitCode.DONE else "failed"
    return Known(name=name, state=state, run=RunDirectory.of(name), outcome=outcome, log_dir=folder)


def ending_of(run: RunDirectory | None) -> str:
    """Return `stopped`, or `failed: REASON`, of a deployment of this host that has ended; empty while it runs."""
    if run is None or run.holder() is not None:
        return ""
    last = last_start(run.name)
    if last is None or last.state != "failed":
        return "stopped"
    cause = last.cause or {}
    return f"failed: {cause.get('message') or last.outcome.get('reason') or 'see mstarctl logs'}"


def last_log_dir(name: str) -> Path | None:
    """Return the log directory of the newest start called `name`."""
    root = state_root() / check_name(name)
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    return folders[-1] if folders else None


def read_outcome(folder: Path) -> dict[str, Any] | None:
    """Return the outcome in a log directory; None while the deployment runs, or if its supervisor was killed."""
    try:
        outcome = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return outcome if isinstance(outcome, dict) else None


def _logged_names() -> Iterator[str]:
    root = state_root()
    if root.is_dir():
        yield from sorted(path.name for path in root.iterdir() if path.is_dir() and any(path.glob("*/supervisor.log")))


def _ended_at(item: Known) -> float:
    stated = item.outcome.get("ended_at")
    if isinstance(stated, int | float):
        return float(stated)
    return item.log_dir.stat().st_mtime if item.log_dir is not None else 0.0
