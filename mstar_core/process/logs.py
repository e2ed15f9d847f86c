"""JSON logging of a process: one object per line on standard output, set up by each main, read by the supervisor.

A message may hold ids, numbers and names of parts; never a prompt, never a key.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from mstar_core.messages.names import rank_of

LINE_LIMIT_BYTES: Final = 1024 * 1024
"""Longer lines are shortened, because the supervisor buffers whole lines."""

HIDDEN: Final = "[hidden]"

REQUEST_ID: ContextVar[str] = ContextVar("mstar_request_id", default="")
"""The client's id of the request that the current task serves; each log line of the task carries it."""


@contextmanager
def request_scope(request_id: str) -> Iterator[None]:
    """Add the request's id to every line that is logged inside the block."""
    token = REQUEST_ID.set(request_id)
    try:
        yield
    finally:
        REQUEST_ID.reset(token)


class Writable(Protocol):
    """A stream that lines are written to."""

    def write(self, text: str, /) -> object: ...


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON line. JSON escapes line breaks and control characters, so no value can forge a line.

    `extra={"facts": {...}}` adds facts under their own names.
    """

    def __init__(self, child: str, secrets: Sequence[str] = ()) -> None:
        super().__init__()
        self._child = child
        self._rank = rank_of(child)
        self._secrets = tuple(secret for secret in secrets if secret)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "child": self._child,
            **({} if self._rank is None else {"rank": self._rank}),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = REQUEST_ID.get()
        if request_id:
            line["request"] = request_id
        facts = getattr(record, "facts", None)
        if isinstance(facts, dict):
            line |= {key: value for key, value in facts.items() if key not in line}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return self._bounded(line)

    def hide(self, secrets: Sequence[str]) -> None:
        """Hide more texts."""
        self._secrets = tuple(dict.fromkeys((*self._secrets, *(secret for secret in secrets if secret))))

    def _bounded(self, line: dict[str, Any]) -> str:
        text = self._hide(json.dumps(line, default=str))
        if len(text) <= LINE_LIMIT_BYTES:
            return text
        kept = {key: line[key] for key in ("time", "level", "child", "logger")}
        kept["message"] = str(line["message"])[:4096]
        kept["cut"] = len(text)
        return self._hide(json.dumps(kept))

    def _hide(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text


def hide_secrets(secrets: Sequence[str]) -> None:
    """Hide these texts in every later line of this process, beside those that are hidden already."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.hide(secrets)


def start_logging(
    child: str, level: str = "INFO", *, secrets: Sequence[str] = (), stream: Writable | None = None
) -> None:
    """Send every logger of this process to `stream` (standard output) as JSON lines. Replaces earlier handlers."""
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(JsonFormatter(child, secrets))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
