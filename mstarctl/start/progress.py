"""Progress view of a start: one line per process, redrawn on a terminal; one line per phase elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

from mstarctl.output import duration_text, size_text
from mstarctl.output.line import Line, fit, join, line
from mstarctl.output.options import GlobalOptions
from mstarctl.output.paint import Paint, takes_ascii_only
from mstarctl.output.table import cell_width, escape

BYTES: Final = ("fetch", "weights")
NETWORK: Final = ("fetch",)
BAR_CELLS: Final = 20
SPINNER: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
ASCII_SPINNER: Final = "|/-\\"
FRAMES_S: Final = 10.0
STILL_S: Final = 5.0
"""Time without data after which a download is shown as still."""

SUPERVISOR: Final = "supervisor"
REPEAT_S: Final = 5.0
"""Interval of progress lines in a long phase, if stderr is not a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """One process of a start. who: rank or name. what: its nodes or address."""

    who: str
    what: str
    phase: str
    done: int
    total: int
    detail: str
    is_ready: bool

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.total) if self.total > 0 else 0.0

    @property
    def amount(self) -> str:
        """Progress as `41.8 MiB/62.1 GiB` or `17/24`."""
        if self.total <= 0:
            return ""
        if self.phase in BYTES:
            return f"{size_text(self.done)}/{size_text(self.total)}"
        return f"{self.done}/{self.total}"


def rows_of(snapshot: dict[str, Any]) -> list[ProcessRow]:
    """Return the rows of a snapshot: ranks with their nodes, the api with its address, other processes by name."""
    nodes = {f"worker-{rank['rank']}": " ".join(rank["nodes"]) for rank in snapshot["ranks"].values()}
    endpoint = snapshot["deployment"]["endpoint"]
    rows = []
    for name, child in snapshot["children"].items():
        if name == SUPERVISOR:
            continue
        is_rank = name in nodes
        rows.append(
            ProcessRow(
                who=name.replace("worker-", "rank ") if is_rank else name,
                what=nodes.get(name, endpoint if name == "api" else ""),
                phase="ready" if child["state"] == "ready" else str(child["phase"]),
                done=int(child["done"]),
                total=int(child["total"]),
                detail=str(child["detail"]),
                is_ready=child["state"] == "ready",
            )
        )
    return rows


def row_line(row: ProcessRow, widths: tuple[int, int], rate: float = 0.0, *, is_ascii: bool = False) -> str:
    """Format one row. rate: units per second, 0 if unknown."""
    return row_parts(row, widths, Pulse(rate=rate), is_ascii=is_ascii).plain.rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Signs of life of a row. spinner: its current glyph. phase_s: age of the phase. still_s: time without progress."""

    rate: float = 0.0
    spinner: str = ""
    phase_s: float = 0.0
    still_s: float = 0.0


def row_parts(row: ProcessRow, widths: tuple[int, int], pulse: Pulse, *, is_ascii: bool = False) -> Line:
    """Draw one row: `⠹ rank 0  LLM  weights  ━━━╌╌  1.2 GiB/6.1 GiB  210.0 MiB/s  24.0 s left  12.4 s`."""
    mark = ("+" if is_ascii else "✓") if row.is_ready else pulse.spinner
    parts = [
        line(
            (f"{mark if pulse.spinner else ' '} ", "ok" if row.is_ready else "accent"),
            (f"{row.who:<{widths[0]}}", "strong"),
            (f"  {row.what:<{widths[1]}}", "dim"),
            (f"  {row.phase}", "ok" if row.is_ready else "value"),
        )
    ]
    if row.total > 0 and not row.is_ready:
        parts += [line((bar(row.share, is_ascii=is_ascii), "accent")), line((row.amount, "value"))]
        if pulse.rate > 0 and row.phase in BYTES and pulse.still_s < STILL_S:
            left = duration_text((row.total - row.done) / pulse.rate)
            parts += [line((f"{size_text(pulse.rate)}/s", "value")), line((f"{left} left", "dim"))]
    if row.phase in NETWORK and pulse.still_s >= STILL_S:
        parts.append(line((f"no data from the network for {duration_text(pulse.still_s)}", "warn")))
    if row.detail and not row.is_ready:
        parts.append(line((escape(row.detail), "dim")))
    if pulse.phase_s >= 1.0 and not row.is_ready:
        parts.append(line((duration_text(pulse.phase_s), "dim")))
    return join(parts)


def bar(share: float, cells: int = BAR_CELLS, *, is_ascii: bool = False) -> str:
    """Draw a progress bar of `cells` cells."""
    full = round(share * cells)
    return "#" * full + "." * (cells - full) if is_ascii else "━" * full + "╌" * (cells - full)


def widths_of(rows: Sequence[ProcessRow]) -> tuple[int, int]:
    """Return the widths of the two name columns."""
    return max((cell_width(row.who) for row in rows), default=0), max((cell_width(row.what) for row in rows), default=0)


def ready_line(snapshot: dict[str, Any]) -> str:
    """Return `ready in 48.1 s (weights 21, kv 1)`; phases under 50 ms are omitted."""
    head = snapshot["deployment"]
    phases = [f"{name} {_seconds(s)}" for name, s in head.get("phases_s", {}).items() if s >= 0.05 and name != "ready"]
    took = duration_text(float(head["ready_s"] or head["age_s"]))
    return f"ready in {took}" + (f" ({', '.join(phases)})" if phases else "")


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


@dataclass(slots=True)
class Rates:
    """Smoothed progress per second of each row. Owned by one view."""

    seen: dict[str, tuple[str, int, float, float]] = field(default_factory=dict)
    moved: dict[str, tuple[str, float, int, float]] = field(default_factory=dict)

    def pulse(self, row: ProcessRow, now: float, spinner: str) -> Pulse:
        """Return the rate, the age of the phase and the time without progress."""
        phase, since, done, moved = self.moved.get(row.who, ("", now, -1, now))
        if phase != row.phase:
            since, moved = now, now
        elif row.done != done:
            moved = now
        self.moved[row.who] = (row.phase, since, row.done, moved)
        return Pulse(rate=self.of(row, now), spinner=spinner, phase_s=now - since, still_s=now - moved)

    def of(self, row: ProcessRow, now: float) -> float:
        """Return units per second since the first progress of the phase."""
        phase, done, at, rate = self.seen.get(row.who, ("", 0, now, 0.0))
        if phase != row.phase or row.done < done:
            self.seen[row.who] = (row.phase, row.done, now, 0.0)
            return 0.0
        if now - at >= 0.5:
            fresh = (row.done - done) / (now - at)
            rate = fresh if rate == 0 else 0.7 * rate + 0.3 * fresh
            self.seen[row.who] = (row.phase, row.done, now, rate)
        return rate


class TerminalView:
    """Redraws the rows in place on a terminal."""

    def __init__(self, stream: TextIO, width: int, paint: Paint | None = None, *, is_ascii: bool = False) -> None:
        self._stream = stream
        self._width = width
        self._paint = paint or Paint()
        self._is_ascii = is_ascii
        self._begun = time.monotonic()
        self._drawn = 0
        self._rates = Rates()

    def show(self, snapshot: dict[str, Any]) -> None:
        """Draw a snapshot over the previous one."""
        rows = rows_of(snapshot)
        if not rows:
            return
        now, widths = time.monotonic(), widths_of(rows)
        frames = ASCII_SPINNER if self._is_ascii else SPINNER
        spinner = frames[int((now - self._begun) * FRAMES_S) % len(frames)]
        drawn = [row_parts(row, widths, self._rates.pulse(row, now, spinner), is_ascii=self._is_ascii) for row in rows]
        lines = [self._paint.line(row if row.width < self._width else fit(row, self._width - 1)) for row in drawn]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        self._stream.write(up + "".join(f"\r\x1b[2K{line}\n" for line in lines))
        if len(lines) < self._drawn:
            rest = self._drawn - len(lines)
            self._stream.write("\x1b[2K\n" * rest + f"\x1b[{rest}A")
        self._drawn = len(lines)
        self._stream.flush()


class PlainView:
    """Prints a line when a process enters a phase, and every few seconds in a long phase. For pipes and log files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said: dict[str, tuple[str, float, int]] = {}

    def show(self, snapshot: dict[str, Any]) -> None:
        """Print the changes of a snapshot."""
        rows, now = rows_of(snapshot), time.monotonic()
        for row in rows:
            phase, at, done = self._said.get(row.who, ("", 0.0, -1))
            if phase == row.phase and (now - at < REPEAT_S or row.done == done or row.is_ready):
                continue
            self._said[row.who] = (row.phase, now, row.done)
            text = "  ".join(
                part for part in (f"  {row.who}", row.what, row.phase, "" if row.is_ready else row.amount) if part
            )
            print(text, file=self._stream, flush=True)


class SilentView:
    """Shows nothing (-q)."""

    def show(self, snapshot: dict[str, Any]) -> None:
        """Do nothing."""


View = TerminalView | PlainView | SilentView


def view_of(options: GlobalOptions) -> View:
    """Return the view for stderr: redrawn on a terminal, line by line elsewhere, none with -q."""
    if options.quiet:
        return SilentView()
    if sys.stderr.isatty():
        width, paint = shutil.get_terminal_size().columns, Paint.of(options, sys.stderr)
        return TerminalView(sys.stderr, width, paint, is_ascii=takes_ascii_only())
    return PlainView(sys.stderr)
