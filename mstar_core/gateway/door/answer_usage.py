"""Usage of a request from the bytes of its answer, for deployments whose reports the gateway cannot read.

Bytes pass untouched. Cost per piece: one search for deltas; the last 64 KiB are kept without a copy.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mstar_core.gateway.parts import AnsweredUsage

TAIL_BYTES: Final = 64 << 10
"""End of an answer in which its usage stands: the last event of a stream, or the end of a JSON object."""

DONE: Final = '"response.done"'
"""Type of the event of a realtime session that has the usage of one response."""

_USAGE: Final = re.compile(rb'"usage"\s*:\s*(?=\{)')
"""The key of a usage object. Inside a string its quotes would be escaped, so a client's text never matches."""

_DELTA: Final = re.compile(
    rb'"delta"\s*:\s*(?:"[^"]|\{[^{}]{0,200}?"(?:reasoning_)?content"\s*:\s*"[^"])|"text"\s*:\s*"[^"]'
)
"""A piece of text in an event: of chat, of responses, and of completions."""

_INPUTS: Final = ("prompt_tokens_details", "input_tokens_details", "input_token_details")


@dataclass(slots=True)
class UsageReader:
    """Reads one answer. Owned by the door. is_stream: of server-sent events.

    deltas: pieces of text in them so far, each of at least one token.
    """

    is_stream: bool
    deltas: int = 0
    _pieces: deque[bytes] = field(default_factory=deque)
    _size: int = 0

    def feed(self, piece: bytes) -> None:
        """Take over the next piece."""
        if self.is_stream:
            self.deltas += len(_DELTA.findall(piece))
        self._pieces.append(piece)
        self._size += len(piece)
        while self._size - len(self._pieces[0]) >= TAIL_BYTES:
            self._size -= len(self._pieces.popleft())

    def usage(self) -> AnsweredUsage | None:
        """Return the usage that the answer names, else its deltas as tokens: a stream may end before, or without it.

        None for an answer that has neither, such as a sound.
        """
        named = last_usage(b"".join(self._pieces))
        if named is not None:
            return named
        return AnsweredUsage(output_tokens=self.deltas) if self.deltas else None


@dataclass(slots=True)
class SessionUsage:
    """Reads the events of one realtime session. total: of all responses so far."""

    total: AnsweredUsage = field(default_factory=AnsweredUsage)

    def feed(self, event: str) -> bool:
        """Take over an event. Returns whether it has added usage."""
        found = last_usage(event.encode()) if DONE in event else None
        if found is None:
            return False
        self.total = self.total.plus(found)
        return True


def last_usage(body: bytes) -> AnsweredUsage | None:
    """Return the last whole usage object of a body, None without one."""
    for key in reversed(list(_USAGE.finditer(body))):
        try:
            found, _ = json.JSONDecoder().raw_decode(body[key.end() :].decode("utf-8", "replace"))
        except json.JSONDecodeError:  # it goes on behind the end
            continue
        if isinstance(found, dict) and found:
            return usage_of(found)
    return None


def usage_of(found: Mapping[str, Any]) -> AnsweredUsage:
    """Return a usage object of any route: OpenAI's names, and the further ones of `/generate`."""
    details: list[Any] = [found.get(name) for name in _INPUTS]
    cached = next((each.get("cached_tokens") for each in details if isinstance(each, dict)), 0)
    return AnsweredUsage(
        input_tokens=int(_number(found.get("prompt_tokens", found.get("input_tokens")))),
        cached_tokens=int(_number(cached)),
        output_tokens=int(_number(found.get("completion_tokens", found.get("output_tokens")))),
        audio_in_s=_number(found.get("seconds")) if found.get("type") == "duration" else 0.0,
        audio_out_s=_number(found.get("audio_seconds")),
        images=int(_number(found.get("images"))),
    )


def _number(value: Any) -> float:
    """Return a number of another server; 0 for what cannot be a count."""
    is_count = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if is_count else 0.0
