"""Why a child ended: what it wrote itself, or what its exit status, its memory and the kernel tell. For the supervisor.

A record that the supervisor makes is written to the run directory like a child's own.
"""

from __future__ import annotations

import json
import signal
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from mstar_core.host.run_dir import RunDirectory
from mstar_core.process.failures import write_fatal
from mstar_core.supervisor.child import Child
from mstar_core.supervisor.log_file import LogFile

LATELY_S: Final = 3.0
LAST_WORDS_S: Final = 60.0
"""A log line that is older says nothing of an end."""

MIB: Final = 1 << 20


@dataclass(slots=True)
class OomKills:
    """How often the kernel has ended a process of this host for lack of memory, lately. Looked at once a second."""

    path: Path = Path("/proc/vmstat")
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def look(self, now: float) -> None:
        """Note the count. A kernel that does not tell it is asked in vain."""
        count = self._count()
        if count is None:
            return
        while len(self._seen) > 1 and self._seen[1][0] <= now - LATELY_S:
            self._seen.popleft()
        self._seen.append((now, count))

    def lately(self) -> int | None:
        """How many there were since the look of about three seconds ago; None where the kernel does not tell."""
        count = self._count()
        return None if count is None or not self._seen else count - self._seen[0][1]

    def _count(self) -> int | None:
        with suppress(OSError, ValueError, IndexError):
            for line in self.path.read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What was known of a child when it died. resident_bytes: when it was last looked at. memory_kills: see above."""

    resident_bytes: int | None = None
    memory_kills: int | None = None


def death_record(child: Child, run: RunDirectory, status: int, known: Circumstances) -> dict[str, Any]:
    """Why a child ended. Written to its `fatal.json` when it could not do so itself."""
    path = run.children / f"{child.name}.fatal.json"
    with suppress(OSError, ValueError):
        record = json.loads(path.read_text())
        if isinstance(record, dict) and record.get("pid") == child.pid:
            # Its own phase wins: the last message of a process that dies may not have arrived.
            return {**record, "status": status, "phase": record.get("phase") or child.phase, "log": str(child.log.path)}
    memory = "" if known.resident_bytes is None else f"it held {known.resident_bytes / MIB:,.0f} MiB"
    made = {
        "name": child.name,
        "pid": child.pid,
        "incarnation": child.incarnation,
        "monotonic": time.monotonic(),
        "time": time.time(),
        "class": "ProcessDied",
        "code": "process_died",
        "message": f"{child.name} {describe_status(status)}",
        "detail": "; ".join(word for word in (memory, _last_words(child.log, time.time())) if word),
        "hint": _hint(status, known.memory_kills),
        "status": status,
        "signal": signal_name(status),
        "resident_bytes": known.resident_bytes,
        "phase": child.phase,
        "log": str(child.log.path),
    }
    with suppress(OSError):  # a full disk does not hide the cause: it is in the supervisor's own record too
        write_fatal(path, made)
    return made


def describe_status(status: int) -> str:
    """An exit status in words."""
    return f"ended with exit status {status}" if status >= 0 else f"was killed by {signal_name(status)}"


def signal_name(status: int) -> str:
    """The signal of an exit status, empty when there was none."""
    if status >= 0:
        return ""
    with suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


def _hint(status: int, memory_kills: int | None) -> str:
    if status == -signal.SIGKILL and memory_kills:
        word = "process" if memory_kills == 1 else "processes"
        return (
            f"the kernel ended {memory_kills} {word} of this host for lack of memory in these seconds: see its log; "
            "use less memory (kv_cache.pages, max_concurrent_requests), or a larger host"
        )
    if status == -signal.SIGKILL and memory_kills is None:
        return "if nobody sent that signal, the kernel ran out of memory: see the host's kernel log"
    if status == -signal.SIGKILL:
        return "somebody sent that signal: the kernel counts no process that it ended for lack of memory then"
    if status in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL):
        return "its stacks are at the end of its log"
    return ""


def _last_words(log: LogFile, now: float) -> str:
    """What it said last, unless that was long before: then it has nothing to do with the end. now: wall clock."""
    for line in reversed(log.tail):
        with suppress(ValueError):
            facts = json.loads(line)
            said = facts.get("time")
            is_old = bool(said) and now - datetime.fromisoformat(said).timestamp() > LAST_WORDS_S
            return "" if is_old else f"its last words: {facts.get('message')}"
        if line.strip():
            return f"its last words: {line.strip()[:300]}"
    return ""
