"""Errors of the runtime, one tree for all processes and commands.

MstarError                 title, detail, hint, exit_code, status, code
├─ UsageError              invalid command line
├─ ConfigError             file, line, key, nearest
├─ PluginError             plugin, distribution, phase
├─ GraphError              place, nearest
├─ NotFound                kind, name, nearest
├─ RequestError            field, value, allowed            4xx
│  ├─ TooLarge             over a limit                      413
│  ├─ BadMedia             well formed, cannot be used       422
│  ├─ Duplicate            request id in flight              409
│  ├─ Overloaded           retry_after_s                     429
│  ├─ Cancelled            by id or by a closed connection   499
│  └─ TimedOut             deadline                          504
├─ EngineError             node; one request failed          500
│  └─ OutOfMemory          no room on the device for it
├─ StartError              phase, log
│  └─ WeightsError         file, where it looked
├─ Unreachable             deployment does not answer
├─ Refused                 the peer lacks the right          403
├─ StateConflict           not in the current state          409
├─ Unavailable             starting, draining                503
│  └─ WorkerLost           rank, cause                       503
└─ TransportError          peer
   ├─ PeerStalled          queue full
   └─ ArenaFull            needed, free
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable
from typing import Any


class ExitCode(enum.IntEnum):
    """Exit codes of every command (docs/cli.md)."""

    DONE = 0
    INTERNAL = 1
    USAGE = 2
    INVALID = 3
    NOT_FOUND = 4
    UNREACHABLE = 5
    START_FAILED = 6
    TIMED_OUT = 7
    ASSERTION = 8
    REFUSED = 9
    CANCELLED = 10
    INTERRUPTED = 130


LONGEST_NAME = 200
"""Characters of a name that are compared, because a peer may send a name of megabytes."""


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice most similar to `name`, or None if none is close."""
    found = difflib.get_close_matches(name[:LONGEST_NAME], list(choices), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean_one_of(name: str, choices: Iterable[str], count: int = 3) -> str:
    """Return a hint with the most similar choices, for ids that are too many to list; empty if none is close."""
    found = difflib.get_close_matches(name[:LONGEST_NAME], sorted(set(choices)), n=count, cutoff=0.4)
    if not found:
        return ""
    *most, last = map(repr, found)
    return f"did you mean {', '.join(most)} or {last}?" if most else f"did you mean {last}?"


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return a hint for a name that is not among `choices`."""
    known = sorted(set(choices))
    best = nearest(name, known)
    if best is not None:
        return f"did you mean {best!r}?"
    return f"choose one of: {', '.join(known)}" if known else "no choices exist"


class MstarError(Exception):
    """Root of the tree. title: what failed. detail: why, with numbers. hint: what to try."""

    exit_code: ExitCode = ExitCode.INTERNAL
    status: int = 500
    code: str = "internal_error"

    def __init__(self, title: str, detail: str = "", hint: str = "", **facts: Any) -> None:
        super().__init__(title)
        self.title = title
        self.detail = detail
        self.hint = hint
        code = facts.pop("code", None)
        if code is not None:
            self.code = code
        self.facts: dict[str, Any] = facts

    def __str__(self) -> str:
        return "; ".join(part for part in (self.title, self.detail, self.hint) if part)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has every field; the default copies the title alone.
        return (_rebuild, (type(self), self.title, self.detail, self.hint, self.code, self.facts))

    @property
    def public(self) -> str:
        """The text for API clients: title and hint, without paths and tracebacks."""
        return "; ".join(part for part in (self.title, self.hint) if part)


def _rebuild(
    kind: type[MstarError], title: str, detail: str, hint: str, code: str, facts: dict[str, Any]
) -> MstarError:
    return kind(title, detail, hint, code=code, **facts)


class UsageError(MstarError):
    exit_code = ExitCode.USAGE
    status = 400
    code = "usage"


class ConfigError(MstarError):
    """A configuration file or value is invalid. Facts: file, line, key, nearest."""

    exit_code = ExitCode.INVALID
    status = 400
    code = "invalid_config"


class PluginError(MstarError):
    """A plugin cannot be used. Facts: plugin, distribution, phase."""

    exit_code = ExitCode.INVALID
    code = "plugin_error"


class GraphError(MstarError):
    """A model's graph is inconsistent. Facts: place, nearest."""

    exit_code = ExitCode.INVALID
    code = "invalid_graph"


class NotFound(MstarError):
    """No object has that name. Facts: kind, name, nearest."""

    exit_code = ExitCode.NOT_FOUND
    status = 404
    code = "not_found"


class RequestError(MstarError):
    """The request can never work as written. Facts: field (the parameter), value, allowed."""

    exit_code = ExitCode.USAGE
    status = 400
    code = "invalid_value"

    @property
    def field(self) -> str | None:
        value = self.facts.get("field")
        return str(value) if value is not None else None


class TooLarge(RequestError):
    status = 413
    code = "over_capacity"


class BadMedia(RequestError):
    status = 422
    code = "undecodable_media"


class Duplicate(RequestError):
    status = 409
    code = "request_id_in_use"


class Overloaded(RequestError):
    """The queue is full. Facts: retry_after_s."""

    exit_code = ExitCode.UNREACHABLE
    status = 429
    code = "queue_full"

    @property
    def retry_after_s(self) -> int:
        return int(self.facts.get("retry_after_s", 1))


class Cancelled(RequestError):
    exit_code = ExitCode.CANCELLED
    status = 499
    code = "cancelled"


class TimedOut(RequestError):
    exit_code = ExitCode.TIMED_OUT
    status = 504
    code = "timeout"


class EngineError(MstarError):
    """One request failed in a node; other requests continue. Facts: node."""

    code = "engine_error"


class OutOfMemory(EngineError):
    """A step of one request ran out of device memory; other requests continue. Facts: node."""

    code = "out_of_memory"


class StartError(MstarError):
    """A deployment did not start. Facts: phase, log."""

    exit_code = ExitCode.START_FAILED
    status = 503
    code = "start_failed"


class Unreachable(MstarError):
    exit_code = ExitCode.UNREACHABLE
    status = 503
    code = "unreachable"


class Refused(MstarError):
    """The deployment belongs to another user, or is read-only for this one."""

    exit_code = ExitCode.REFUSED
    status = 403
    code = "refused"


class StateConflict(MstarError):
    """The call conflicts with the current state of the deployment."""

    exit_code = ExitCode.UNREACHABLE
    status = 409
    code = "conflict"


class Unavailable(MstarError):
    """The deployment is starting or draining."""

    exit_code = ExitCode.UNREACHABLE
    status = 503
    code = "unavailable"


class WorkerLost(Unavailable):
    """A process that held the request died. Facts: rank, cause."""

    code = "worker_lost"


class WeightsError(StartError):
    """Weights are missing or damaged. Facts: file, looked."""

    exit_code = ExitCode.INVALID
    code = "weights"


class TransportError(MstarError):
    """Bytes or messages could not be moved. Facts: peer."""

    code = "transport"


class PeerStalled(TransportError):
    """The peer does not read its messages, and its queue is full. The request can be sent again."""

    status = 503
    code = "peer_stalled"


class ArenaFull(TransportError):
    """Shared memory has no space for a tensor. Facts: needed, free."""

    code = "out_of_memory"
