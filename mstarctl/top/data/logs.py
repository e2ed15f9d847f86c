"""Log lines of processes, parsed and merged by time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mstarctl.client.log_lines import SHOWN_APART, fields_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """One log line. level, time, request and facts are empty for plain text. facts: other fields, `status=400`."""

    source: str
    message: str
    level: str = ""
    time: str = ""
    request: str = ""
    facts: str = ""

    @property
    def text(self) -> str:
        """The message and the other fields."""
        return f"{self.message}  {self.facts}" if self.facts else self.message


def parse(source: str, text: str) -> Logged:
    """Parse a line of a child: JSON with time, level and message, or plain text."""
    try:
        facts: Any = json.loads(text) if text.startswith("{") else None
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        return Logged(source=source, message=text)
    return Logged(
        source=source,
        message=str(facts.get("message", text)),
        level=str(facts.get("level", "")).upper(),
        time=str(facts.get("time", ""))[11:],
        request=str(facts.get("request") or ""),
        facts=fields_text(facts, (*SHOWN_APART, "request")),
    )


def merged(lines: Sequence[Logged]) -> list[Logged]:
    """Sort lines of several processes by time. Plain text stays behind the line that it followed."""
    stamps: dict[str, str] = {}
    dated = []
    for logged in lines:
        stamps[logged.source] = logged.time or stamps.get(logged.source, "")
        dated.append((stamps[logged.source], logged))
    return [logged for _, logged in sorted(dated, key=lambda pair: pair[0])]
