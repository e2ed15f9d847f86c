"""Causes of deaths: the record that a child wrote, or one made from its exit status, memory, log and the kernel.

Also the outcome of a deployment, which `up`, `ps` and `describe` read from the log folder after the supervisor's end.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import ExitCode, MstarError, StartError
from mstar_core.host.run_dir import RunDirectory
from mstar_core.process.failures import fatal_path, write_fatal
from mstar_core.supervisor.child import Child
from mstar_core.supervisor.hosts.remote_process import HOST_LOST
from mstar_core.supervisor.log_file import LogFile

RECENT_LINE_S: Final = 2.0
"""Age above which the last log line is unrelated to the death. The lines of a crash are written in its last moments."""

MIB: Final = 1 << 20
PUBLIC_NAMES: Final = {"worker": "a worker", "follower": "a worker", "conductor": "the conductor", "api": "the api"}
OUTCOME_FILE: Final = "outcome.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """State at a death. resident_bytes: last reading of the child. memory_kills: recent ones on the host."""

    resident_bytes: int | None = None
    memory_kills: int | None = None


def death_record(child: Child, run: RunDirectory, status: int, known: Circumstances) -> dict[str, Any]:
    """Return why a child ended. If the child wrote no `fatal.json`, the record is written there."""
    written = child.process.fatal() if child.process is not None else None
    if written is not None:
        # The record's phase wins: the last message of a dying process may not have arrived.
        facts = {"status": status, "phase": written.get("phase") or child.phase, "log": str(child.log.path)}
        return {**written, **facts, **_where(child, str(written.get("message", "")), written.get("code"))}
    memory = "" if known.resident_bytes is None else f"resident memory {known.resident_bytes / MIB:,.0f} MiB"
    last_line = "" if child.hung else _last_line(child.log, time.monotonic())  # the last lines are its stacks
    record = {
        "name": child.name,
        "pid": child.pid,
        "incarnation": child.incarnation,
        "monotonic": time.monotonic(),
        "time": time.time(),
        "class": "ProcessDied",
        "code": "process_died",
        "message": f"{child.name} {'hung and ' if child.hung else ''}{describe_status(status)}",
        "detail": "; ".join(part for part in (child.hung, memory, last_line) if part),
        "hint": "its stacks are in its log" if child.hung else _hint(status, known.memory_kills),
        "status": status,
        "signal": signal_name(status),
        "hung": bool(child.hung),
        "resident_bytes": known.resident_bytes,
        "phase": child.phase,
        "log": str(child.log.path),
    }
    record |= _where(child, str(record["message"]), None)
    with suppress(OSError):  # on a full disk the supervisor's own record still has the cause
        write_fatal(fatal_path(run.path, child.name), record)
    return record


def _where(child: Child, message: str, code: object) -> dict[str, Any]:
    """Return host and message of a death on another host than the supervisor's; nothing for one on that."""
    if not child.host:
        return {}
    return {"host": child.host, "message": message if code == HOST_LOST else f"{message} on host {child.host}"}


def start_record(name: str, error: MstarError | OSError) -> dict[str, Any]:
    """Return why a child could not be started at all."""
    if isinstance(error, OSError):
        error = StartError(f"{name} cannot be started", str(error))
    return {
        "name": name,
        "message": error.title,
        "detail": error.detail,
        "hint": error.hint,
        "monotonic": time.monotonic(),
        "time": time.time(),
        "code": error.code,
    }


def describe_status(status: int) -> str:
    """Describe an exit status in words."""
    return f"ended with exit status {status}" if status >= 0 else f"was killed by {signal_name(status)}"


def signal_name(status: int) -> str:
    """Return the signal of an exit status, empty if there was none."""
    if status >= 0:
        return ""
    with suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


def _hint(status: int, memory_kills: int | None) -> str:
    if status == -signal.SIGKILL and memory_kills:
        processes = "1 process" if memory_kills == 1 else f"{memory_kills} processes"
        return (
            f"the kernel killed {processes} of this host for lack of memory within these seconds: see its log; "
            "use less memory (kv_cache.pages, max_concurrent_requests), or a larger host"
        )
    if status == -signal.SIGKILL and memory_kills is None:
        return "the kernel may have run out of memory: see the host's kernel log"
    if status == -signal.SIGKILL:
        return "another process sent that signal: the kernel reports no kill for lack of memory"
    if status in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL):
        return "its stacks are at the end of its log"
    return ""


def _last_line(log: LogFile, now: float) -> str:
    """Return the last log line, unless it is too old to be related. now: of the monotonic clock."""
    if now - log.written > RECENT_LINE_S:
        return ""
    line = next((line for line in reversed(log.tail) if line.strip()), "")
    with suppress(ValueError, KeyError, TypeError):
        return f"last log line: {json.loads(line)['message']}"
    return f"last log line: {line.strip()[:300]}" if line else ""


def exit_code_of(record: dict[str, Any]) -> ExitCode:
    """Return the exit code of a start that failed with this record."""
    if record.get("code") == "stalled":
        return ExitCode.TIMED_OUT
    return ExitCode.INVALID if record.get("status") == ExitCode.INVALID else ExitCode.START_FAILED


def cause_sentence(record: dict[str, Any]) -> str:
    """Describe a death in one sentence."""
    detail = record.get("detail") or ""
    return f"{record.get('message', 'a process died')}{f' ({detail})' if detail else ''}"


def public_sentence(record: dict[str, Any]) -> str:
    """Describe a death to clients: no name of a process, no text of a log, no figure of the host."""
    if record.get("code") == HOST_LOST:
        return "a host was lost"
    kind = str(record.get("name", "")).partition("-")[0]
    process = PUBLIC_NAMES.get(kind, "a process")
    return f"{process} stopped responding" if record.get("hung") else f"{process} died"


def failure_summary(record: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a failure that stay after the deployment has recovered. time: seconds since the epoch."""
    return {key: record[key] for key in ("name", "message", "detail", "time", "log") if key in record}


def in_order(deaths: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records by time of death. The first one is the root cause. Times are one host's monotonic clock."""
    return sorted(deaths, key=lambda record: float(record.get("monotonic", 0.0)))


def outcome(deaths: Iterable[dict[str, Any]], exit_code: ExitCode, reason: str) -> dict[str, Any]:
    """Return the outcome of a deployment: its exit code, the root cause and the deaths that followed."""
    ordered = in_order(deaths)
    return {
        "exit_code": int(exit_code),
        "reason": reason,
        "cause": ordered[0] if ordered else None,
        "followed_by": [f"{record.get('name')}: {record.get('message')}" for record in ordered[1:]],
    }


def write_outcome(log_dir: Path, record: dict[str, Any]) -> None:
    """Write the outcome beside the logs."""
    (log_dir / OUTCOME_FILE).write_text(json.dumps(record, indent=1, default=str))
