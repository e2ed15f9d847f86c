"""Lines of a deployment's logs, read from its log directory during and after its run. Used by `logs`."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import NotFound, UsageError, did_you_mean
from mstarctl.output.table import escape

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
SHOWN_APART: Final = ("time", "level", "child", "rank", "logger", "message", "traceback")
"""Fields of a line that have places of their own on a screen."""

FIELD_CHARACTERS: Final = 200
_ALIASES: Final = {"warn": "warning", "err": "error", "fatal": "critical"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line. facts: the JSON object of a child process; empty for plain text of a native library or traceback."""

    source: str
    text: str
    facts: dict[str, Any]

    @classmethod
    def of(cls, source: str, text: str) -> LogLine:
        try:
            facts = json.loads(text)
        except ValueError:
            facts = {}
        return cls(source=source, text=text, facts=facts if isinstance(facts, dict) else {})

    @property
    def level(self) -> str:
        return str(self.facts.get("level", "")).lower()

    @property
    def time(self) -> str:
        return str(self.facts.get("time", ""))

    @property
    def time_s(self) -> float:
        """Seconds since the epoch; 0 for a line without a time."""
        try:
            return datetime.fromisoformat(self.time).timestamp()
        except ValueError:
            return 0.0

    @property
    def message(self) -> str:
        return str(self.facts.get("message", self.text)) if self.facts else self.text


def fields_text(facts: Mapping[str, Any], apart: Collection[str] = SHOWN_APART) -> str:
    """Return the other fields of a line as `status=400 code=invalid_value ms=12`, long values cut."""
    words = []
    for key, value in facts.items():
        if key in apart or value == "":
            continue
        text = escape(str(value))
        words.append(f"{key}={text if len(text) <= FIELD_CHARACTERS else text[: FIELD_CHARACTERS - 3] + '...'}")
    return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """Filter for log lines. level: the lowest that passes; plain text, which has no level, passes only without one.

    oldest_s: seconds since the epoch; a line without a time of its own passes only without it. sources: processes that
    pass, None for all.
    """

    source: str = ""
    sources: frozenset[str] | None = None
    level: str = ""
    pattern: re.Pattern[str] | None = None
    request: str = ""
    oldest_s: float = 0.0

    @classmethod
    def of(
        cls, *, source: str = "", level: str = "", grep: str = "", request: str = "", oldest_s: float = 0.0
    ) -> LogQuery:
        """Build a query. `worker/1` means `worker-1`. Raises UsageError for an unknown level or invalid expression."""
        word = _ALIASES.get(level.lower(), level.lower())
        if word and word not in LEVELS:
            raise UsageError(f"unknown log level {level!r}", hint=did_you_mean(word, LEVELS))
        try:
            pattern = re.compile(grep) if grep else None
        except re.error as error:
            raise UsageError(f"--grep {grep!r} is not a regular expression", str(error)) from error
        return cls(source=source.replace("/", "-"), level=word, pattern=pattern, request=request, oldest_s=oldest_s)

    def takes(self, line: LogLine) -> bool:
        """Return whether the line passes the filter."""
        if not self.takes_source(line.source):
            return False
        if self.level and (line.level not in LEVELS or LEVELS.index(line.level) < LEVELS.index(self.level)):
            return False
        if self.oldest_s and line.time_s < self.oldest_s:
            return False
        if self.request and line.facts.get("request") != self.request:
            return False
        return self.pattern is None or self.pattern.search(line.text) is not None

    def takes_source(self, source: str) -> bool:
        """Return whether lines of a process may pass."""
        return self.source in ("", source) and (self.sources is None or source in self.sources)


def read_logs(folder: Path, query: LogQuery, tail: int) -> list[LogLine]:
    """Return the last `tail` lines that pass the filter, by time. Raises NotFound for an unknown process."""
    files = sorted(folder.glob("*.log"))
    if query.source and query.source not in {path.stem for path in files}:
        known = [path.stem for path in files]
        raise NotFound(
            f"no process {query.source!r}", hint=did_you_mean(query.source, known), kind="process", name=query.source
        )
    chosen = [path for path in files if query.takes_source(path.stem)]
    kept = [(stamp, line) for path in chosen for stamp, line in deque(_dated(path, query), maxlen=tail)]
    return [line for _, line in sorted(kept, key=lambda pair: pair[0])][-tail:] if tail else []


def _dated(path: Path, query: LogQuery) -> Iterator[tuple[str, LogLine]]:
    # Plain text has no time, so it keeps the time of the line before it.
    stamp = ""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in parse_lines(path.stem, file):
            stamp = line.time or stamp
            if query.takes(line):
                yield stamp, line


def parse_lines(source: str, texts: Iterable[str]) -> Iterator[LogLine]:
    """Parse the lines of one process."""
    return (LogLine.of(source, text.rstrip("\n")) for text in texts if text.strip())


def place_of_last_error(path: Path) -> str:
    """Return `PATH:LINE` of the last critical or error line of a log, else of its last line."""
    place, last = 0, 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for last, text in enumerate(file, start=1):
                if '"level": "CRITICAL"' in text or '"level": "ERROR"' in text:
                    place = last
    except OSError:
        return str(path)
    number = place or last
    return f"{path}:{number}" if number else str(path)
