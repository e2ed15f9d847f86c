"""Failures of a process: its fatal record in the run directory, and clean-up steps that cannot raise.

Used by api, conductor, worker and, for the records of children that could not write one, the supervisor.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mstar_core.errors import ExitCode, MstarError
from mstar_core.host.private_files import write_private
from mstar_core.messages.life import PeerDown
from mstar_core.process.logs import REQUEST_ID

log = logging.getLogger("mstar.child")


@contextmanager
def guarded_run(name: str, incarnation: int, run_dir: Path, phase: Callable[[], str] = str) -> Iterator[None]:
    """Record an error that leaves the block as the process's fatal error, then exit with its code."""
    try:
        yield
    except Exception as error:
        note_fatal(error, name, incarnation, run_dir, phase())
        code = error.exit_code if isinstance(error, MstarError) else ExitCode.INTERNAL
        raise SystemExit(int(code)) from error


def note_fatal(error: BaseException, name: str, incarnation: int, run_dir: Path, phase: str = "") -> None:
    """Log a fatal error and write its record to the run directory. Never raises."""
    record = {**fatal_record(error, name, incarnation), "phase": phase}
    log.critical("%s", record["message"], extra={"facts": {key: record[key] for key in ("class", "hint", "where")}})
    with suppress(OSError):
        write_fatal(fatal_path(run_dir, name), record)


def fatal_record(error: BaseException, name: str, incarnation: int) -> dict[str, Any]:
    """Return the facts of a fatal error: times, class, message, facts, place, memory, traceback. All are plain JSON."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    facts = error.facts if isinstance(error, MstarError) else {}
    return {
        "time": time.time(),
        "monotonic": time.monotonic(),
        "name": name,
        "incarnation": incarnation,
        "pid": os.getpid(),
        "class": type(error).__name__,
        "code": error.code if isinstance(error, MstarError) else "internal_error",
        "message": (error.title if isinstance(error, MstarError) else str(error)) or type(error).__name__,
        "detail": error.detail if isinstance(error, MstarError) else "",
        "hint": error.hint if isinstance(error, MstarError) else "",
        "facts": {
            key: value if isinstance(value, (int, float, str, bool)) else str(value) for key, value in facts.items()
        },
        "request": REQUEST_ID.get(),
        "where": f"{last.filename}:{last.lineno}" if last else "",
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux reports KiB
        "traceback": "".join(traceback.format_exception(error)),
    }


def fatal_path(run_dir: Path, name: str) -> Path:
    """Return the file of a process's fatal record."""
    return run_dir / "children" / f"{name}.fatal.json"


def read_fatal(path: Path, pid: int | None) -> dict[str, Any] | None:
    """Return the record that the process with this id wrote, None without one."""
    with suppress(OSError, ValueError):
        record = json.loads(path.read_bytes())
        if isinstance(record, dict) and record.get("pid") == pid:
            return record
    return None


def write_fatal(path: Path, record: dict[str, Any]) -> None:
    """Write `record` atomically. An existing record of the same process stays, because it holds the first cause."""
    if read_fatal(path, record["pid"]) is not None:
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(path, json.dumps(record, indent=1).encode())


def log_lost(into: logging.Logger, down: PeerDown, request_ids: Sequence[str]) -> None:
    """Log the death of a peer: one line, with the ids of all requests that it interrupts."""
    if not request_ids:
        into.warning("%s is gone: %s", down.name, down.cause)
        return
    requests = "1 request" if len(request_ids) == 1 else f"{len(request_ids)} requests"
    facts = {"requests": list(request_ids)}
    into.error("%s is gone, which interrupts %s: %s", down.name, requests, down.cause, extra={"facts": facts})


def attempt(step: Callable[..., object], *arguments: object) -> None:
    """Run one clean-up step. An error is logged with the step's name and does not propagate.

    This is an isolation boundary: the failed clean-up of one request must not affect other requests.
    """
    try:
        step(*arguments)
    except Exception:
        name = getattr(step, "__qualname__", None) or repr(step)
        log.exception("a clean-up step failed, the remaining steps continue: %s", name)
