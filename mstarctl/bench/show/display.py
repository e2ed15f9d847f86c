"""Display of a run on stderr: live at 4 Hz on a terminal, else a line every 5 s, or nothing."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final, Literal, Self

from rich.console import Console, Group
from rich.live import Live

from mstarctl.bench.show.live import MEASURED, LiveState, live_lines, number, warm_text

PLAIN_S: Final = 5.0
Mode = Literal["live", "plain", "quiet"]


class Display:
    """Shows the state of runs. Entered once for all runs of a command."""

    def __init__(self, mode: Mode, *, is_coloured: bool) -> None:
        self.mode = mode
        self._console = Console(stderr=True, no_color=not is_coloured, highlight=False)
        self._live: Live | None = None
        self._printed_at = 0.0

    @classmethod
    def chosen(cls, *, live: bool, plain: bool, quiet: bool, is_coloured: bool) -> Display:
        """Choose a mode: live on a terminal, else plain lines."""
        mode: Mode = "quiet" if quiet else "plain" if plain or not (live or sys.stderr.isatty()) else "live"
        return cls(mode, is_coloured=is_coloured)

    def __enter__(self) -> Self:
        if self.mode == "live":
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, state: LiveState) -> None:
        """Show the state now."""
        if self._live is not None:
            self._live.update(Group(*live_lines(state, self._console.width)), refresh=True)
        elif self.mode == "plain" and time.monotonic() - self._printed_at >= PLAIN_S:
            self._printed_at = time.monotonic()
            print(plain_line(state), file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Print a line above the display."""
        if self.mode != "quiet":
            self._console.print(line, markup=False)


def plain_line(state: LiveState) -> str:
    """Return the state as one line without colour."""
    main = state.histograms.get(state.main)
    middle = main.percentile(50) if main is not None else None
    high = main.percentile(99) if main is not None else None
    figures = f"{state.main} p50 {number(middle)} p99 {number(high)}" if middle is not None and high is not None else ""
    phase = warm_text(state) if state.phase != MEASURED else state.phase
    return (
        f"{state.title} {phase} {state.elapsed_s:.0f} s  sent {state.sent}  done {state.done}  "
        f"in flight {state.in_flight}  err {state.errors}  {figures}"
    ).rstrip()
