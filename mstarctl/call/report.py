"""Figures of a call: counted while lines arrive, narrated on stderr, printed as data on stdout."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final

from mstar_core.client import Line
from mstarctl.call.pace import Paced
from mstarctl.call.sink import Sink
from mstarctl.output import Printer, duration_text
from mstarctl.output.units import counted

REDRAW_S: Final = 0.1
SENTENCE_WORDS: Final = 8
FASTEST_WORDS_PER_S: Final = 6.0
"""Twice the rate of fast speech."""


@dataclass(slots=True)
class Tally:
    """Counts and times of one request, from its lines and a clock. Times in seconds since it was sent.

    kind: the modality whose chunks are counted.
    """

    started: float
    kind: str
    chunks: int = 0
    first_s: float | None = None
    total_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False

    def add(self, line: Line) -> None:
        """Count one line."""
        self.total_s = time.monotonic() - self.started
        if line.modality in ("start", "done"):
            self.facts |= line.metadata
            self.is_done = line.modality == "done"
            return
        if line.modality != self.kind:
            return
        self.chunks += 1
        if self.first_s is None:
            self.first_s = self.total_s


class Progress:
    """Progress line on stderr: redrawn on a terminal; elsewhere one line for the first chunk."""

    def __init__(self, printer: Printer, *, is_streamed: bool) -> None:
        self._printer = printer
        self._is_drawn = is_streamed and sys.stderr.isatty() and not printer.options.quiet
        self._next = 0.0
        self._has_drawn = False
        self._has_said = False

    def show(self, tally: Tally, sink: Sink) -> None:
        """Draw the progress, at most ten times per second."""
        # Text appears as it arrives, so a line about its first piece would stand inside it.
        if tally.chunks and not self._is_drawn and not self._has_said and sink.kind != "text":
            self._has_said = True
            self._printer.say(f"first {sink.kind} after {duration_text(tally.first_s or 0.0)}")
        self.draw(f"{counted(tally.chunks, 'chunk')}  {sink.amount}  {duration_text(tally.total_s)}")

    def show_paced(self, paced: Paced) -> None:
        """Draw the progress of a control loop."""
        self.draw(f"{paced.sent} sent  {paced.missed} missed  {duration_text(paced.total_s)}")

    def draw(self, text: str) -> None:
        """Draw a line over the previous one."""
        now = time.monotonic()
        if self._is_drawn and now >= self._next:
            self._next, self._has_drawn = now + REDRAW_S, True
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if self._has_drawn:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self._has_drawn = False


def is_cut_short(text: str, seconds: float) -> bool:
    """Return whether speech is too short to contain its text. A sentence of few words may be spoken fast."""
    words = len(text.split())
    return words >= SENTENCE_WORDS and words > FASTEST_WORDS_PER_S * seconds


def report(tally: Tally, sink: Sink, who: dict[str, Any], printer: Printer, *, spoken: str = "") -> None:
    """Print the figures of one request. who: deployment, model, weights. spoken: text that the sound reads aloud."""
    factor = tally.total_s / sink.seconds if sink.seconds else None
    facts = tally.facts
    item: dict[str, Any] = {
        "name": facts.get("request_id"),
        **who,
        "out": None if sink.path is None else str(sink.path),
        "files": [str(path) for path in sink.files],
        "modality": sink.kind,
        "chunks": tally.chunks,
        "audio_s": round(sink.seconds, 4) if sink.kind == "audio" else None,
        "bytes": sink.size_bytes,
        "text": sink.text if sink.kind != "text" and sink.text else None,
        "first_ms": _ms(tally.first_s),
        "total_ms": _ms(tally.total_s),
        "real_time_factor": None if factor is None else round(factor, 3),
        "finish_reason": facts.get("finish_reason"),
        "seed": facts.get("seed"),
        "usage": facts.get("usage"),
        "warnings": list(facts.get("warnings", [])),
    }
    for warning in item["warnings"]:
        printer.warn(warning)
    if item["text"]:
        printer.say(f"text: {sink.text}")
    first = "no output" if tally.first_s is None else f"time to first {sink.kind} {duration_text(tally.first_s)}"
    speed = "" if factor is None else f", real-time factor {factor:.2f}"
    took = f"{counted(tally.chunks, 'chunk')}, {sink.amount} in {duration_text(tally.total_s)}"
    name = who["deployment"]
    printer.say(f"{name}: {took} ({first}{speed}; finish: {item['finish_reason']}, seed {item['seed']})")
    if sink.kind == "audio" and not tally.chunks:
        printer.warn("no audio was produced: the model ended before its first window; try another --param seed=N")
    elif sink.kind == "audio" and is_cut_short(spoken, sink.seconds):
        printer.warn(
            f"{sink.seconds:.1f} s of audio are too short for {len(spoken.split())} words: the model ended early; send "
            "one sentence at a time, or try another --param seed=N"
        )
    if sink.path is None:
        return
    for path in sink.files:
        printer.say(f"wrote {path}")
    printer.item("call", item, [str(path) for path in sink.files])


def report_pace(paced: Paced, who: dict[str, Any], printer: Printer) -> None:
    """Print the figures of a control loop."""
    achieved = len(paced.latencies_s) / paced.total_s if paced.total_s else 0.0
    item: dict[str, Any] = {
        "name": who["deployment"],
        **who,
        "rate_hz": paced.rate_hz,
        "period_ms": round(1000 / paced.rate_hz, 3),
        "ticks": paced.ticks,
        "sent": paced.sent,
        "answered": len(paced.latencies_s),
        "missed": paced.missed,
        "late": paced.late,
        "skipped": paced.skipped,
        "failed": paced.failed,
        "errors": paced.errors,
        "achieved_hz": round(achieved, 3),
        "p50_ms": _ms(paced.quantile_s(0.5)),
        "p99_ms": _ms(paced.quantile_s(0.99)),
        "max_ms": _ms(paced.quantile_s(1.0)),
        "longest_gap_ms": _ms(paced.gap_s),
        "total_ms": _ms(paced.total_s),
    }
    share = 100 * paced.missed / paced.ticks if paced.ticks else 0.0
    lines = [
        f"{who['deployment']}  {counted(paced.ticks, 'tick')} at {paced.rate_hz:g} Hz, "
        f"due within {item['period_ms']:g} ms",
        f"  missed    {paced.missed} ({share:.1f} %): late {paced.late}, skipped {paced.skipped}, "
        f"failed {paced.failed}",
        f"  latency   p50 {item['p50_ms']} ms  p99 {item['p99_ms']} ms  max {item['max_ms']} ms",
        f"  answers   {len(paced.latencies_s)}, {achieved:.2f} per second; longest gap {item['longest_gap_ms']} ms",
    ]
    lines += [f"  {count} x {code}" for code, count in paced.errors.items()]
    printer.item("pace", item, lines)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
