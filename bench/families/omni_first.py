"""The first requests of a deployment of Qwen3-Omni: one right after ready, then many clients, while steps are captured.

A capture that is left is a bucket that the deployment planned and has not captured. A miss is a step that ran
uncaptured. Used by `bench/gpu_qwen3omni.py --first`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol, Self

from bench.serving.client import Heard, ask_encoded
from bench.serving.deployment import PLANNED, Served
from mstarctl.bench.measure.playback import silences

WATCH_S: Final = 0.1
RATE: Final = 24000
MISSES: Final = (".graph_misses", ".prefill_misses")


class Asked(Protocol):
    """A kind of request."""

    def encoded(self, port: int, number: int) -> tuple[bytes, bytes]:
        """Return head and body of request `number`."""


@dataclass(slots=True)
class CaptureWatch:
    """Telemetry of the captures of a deployment, read every tenth of a second while the block runs.

    rows: seconds since the start of the block, captures left, graphs captured, and misses, each of all nodes.
    """

    served: Served
    rows: list[tuple[float, int, int, int]] = field(default_factory=list)
    left_by_node: dict[str, int] = field(default_factory=dict)
    misses_by_node: dict[str, int] = field(default_factory=dict)
    start_s: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _first: dict[str, float] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.start_s = time.monotonic()
        self.read()
        self._first = self.served.values()
        self._thread = threading.Thread(target=self._watch, name="captures")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()
        self.read()

    def _watch(self) -> None:
        while not self._stop.wait(WATCH_S):
            self.read()

    def read(self) -> None:
        """Add a row."""
        values = self.served.values()
        left = {name.split(".")[1]: int(value) for name, value in values.items() if name.endswith(PLANNED)}
        captured = sum(value for name, value in values.items() if name.endswith(".graphs_captured"))
        missed = {name: value for name, value in values.items() if name.endswith(MISSES)}
        self.left_by_node = {node: count for node, count in left.items() if count}
        for name, value in missed.items():
            if grown := int(value - self._first.get(name, 0.0)):
                self.misses_by_node[name.partition(".")[2]] = grown
        row = (round(time.monotonic() - self.start_s, 2), sum(left.values()), int(captured), int(sum(missed.values())))
        self.rows.append(row)

    def facts(self) -> dict[str, Any]:
        """Return the last time at which a step missed, when nothing was left, and the rows that changed."""
        changed = [row for row, before in zip(self.rows, [None, *self.rows], strict=False) if _other(row, before)]
        missed = [row[0] for row, before in zip(self.rows[1:], self.rows, strict=False) if row[3] > before[3]]
        done = next((row[0] for row in self.rows if not row[1]), None)
        return {
            "last_miss_s": missed[-1] if missed else 0.0,
            "nothing_left_s": done,
            "left_at_end": self.left_by_node,
            "misses": self.misses_by_node,
            "columns": ["s", "captures left", "captured", "misses"],
            "rows": changed,
        }


def _other(row: tuple[float, int, int, int], before: tuple[float, int, int, int] | None) -> bool:
    return before is None or row[1:] != before[1:]


def first_requests(
    served: Served, work: Asked, port: int, loads: list[tuple[int, int]], errors: dict[str, int]
) -> dict[str, Any]:
    """Send one request at once, then the loads in turn. Returns times of every request, and the captures meanwhile.

    loads: streams and requests of each. errors: takes the codes of failed requests.
    """
    found: dict[str, Any] = {"left_at_ready": served.captures_left()}
    number = 1_000_000
    for streams, rounds in [(1, 1), *loads]:
        parts = [work.encoded(port, number + at) for at in range(streams * rounds)]
        number += len(parts)
        with CaptureWatch(served) as watch:
            heard = asyncio.run(_clients(port, parts, streams))
        for each in heard:
            if each.code:
                errors[each.code] = errors.get(each.code, 0) + 1
        key = "first" if "first" not in found else f"clients_{streams}"
        found[key] = {"requests": [_times(each, watch.start_s) for each in heard], **watch.facts()}
    found["trace_of_first"] = served.last_trace(sort="ended")
    return found


async def _clients(port: int, parts: list[tuple[bytes, bytes]], streams: int) -> list[Heard]:
    left = iter(parts)

    async def one() -> list[Heard]:
        return [await ask_encoded(port, each) for each in left]

    groups = await asyncio.gather(*(one() for _ in range(streams)))
    return sorted((heard for group in groups for heard in group), key=lambda heard: heard.sent_s)


def _times(heard: Heard, start_s: float) -> Mapping[str, float | str]:
    """Return when a request was sent, and the milliseconds to its first text, first sound and end."""
    if heard.code:
        return {"sent_s": round(heard.sent_s - start_s, 3), "code": heard.code}
    found: dict[str, float | str] = {"sent_s": round(heard.sent_s - start_s, 3)}
    marks = {"text_ms": heard.text_marks, "sound_ms": heard.marks, "end_ms": [heard.ended_s]}
    found |= {name: round(1000 * (at[0] - heard.sent_s), 1) for name, at in marks.items() if at}
    if dry := silences(heard.marks, [samples / RATE for samples in heard.samples], 0.0):
        found["gaps"] = len(dry)
    return found
