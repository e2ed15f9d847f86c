"""Record the commands of the README in a real terminal, as an animated SVG without scripts or fonts.

`python scripts/record_tour.py [--out docs/images/tour.svg]` starts a miniature of Qwen3-Omni on two CPU ranks, asks it,
opens the live view while requests run, and stops it. What the picture shows is what the commands printed, with pauses
shortened; a reader can type the same. Needs the extra `recording`.

Rows of the screen that repeat are stored once; a frame refers to its rows. CSS shows one frame at a time.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

import pyte
from pyte.screens import Char

from mstar_core import MStarClient

ROOT: Final = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 132, 36
CELL_X, CELL_Y, MARGIN = 7.2, 15.0, 12.0
BACK, FORE = "#12131a", "#d6d9e6"
NAMED: Final = {
    "black": "#2b2d3a",
    "red": "#ff6b6b",
    "green": "#7bd88f",
    "brown": "#fce566",
    "blue": "#5ad4e6",
    "magenta": "#c792ea",
    "cyan": "#5ad4e6",
    "white": "#d6d9e6",
    "brightblack": "#7d8296",
    "brightred": "#ff8787",
    "brightgreen": "#9be9a8",
    "brightbrown": "#fff08a",
    "brightblue": "#8be9fd",
    "brightmagenta": "#d9b3ff",
    "brightcyan": "#8be9fd",
    "brightwhite": "#ffffff",
}
UNKNOWN: Final = re.compile(
    rb"\x1b\[[<>=][0-9;]*[a-zA-Z]|\x1b\[\?[0-9;]*\$p|\x1b\[[0-9;]*\$[a-zA-Z]|\x1b[P_][^\x1b]*\x1b\\"
)
"""Sequences that pyte prints instead of ignoring: questions about the terminal and its keyboard."""
SAMPLE_S: Final = 0.25
LONGEST_S: Final = 1.6
"""A frame that stands longer is cut to this."""


class Run(NamedTuple):
    """Characters of one style. x: first column."""

    x: int
    text: str
    fore: str
    back: str
    bold: bool


@dataclass(slots=True)
class Recording:
    """Frames of a terminal session: rows of runs, and how long each stands, in seconds."""

    screen: pyte.Screen = field(default_factory=lambda: pyte.Screen(COLUMNS, ROWS))
    frames: list[tuple[tuple[tuple[Run, ...], ...], float]] = field(default_factory=list)

    def take(self, seconds: float) -> None:
        """Add the present screen for so long."""
        rows = tuple(tuple(runs(self.screen.buffer[y])) for y in range(ROWS))
        if self.frames and self.frames[-1][0] == rows:
            seconds += self.frames.pop()[1]
        self.frames.append((rows, seconds))

    def type(self, text: str) -> None:
        """Show a command being typed."""
        stream = pyte.Stream(self.screen)
        stream.feed("\x1b[0m\x1b[32m$\x1b[0m ")
        for start in range(0, len(text), 3):
            stream.feed(text[start : start + 3])
            self.take(0.07)
        stream.feed("\r\n")
        self.take(0.3)


def runs(row: dict[int, Char]) -> Iterator[Run]:
    """Return the visible runs of a row of pyte's screen."""
    cells = [(x, row[x]) for x in range(COLUMNS)]
    for style, group in groupby(cells, key=lambda cell: style_of(cell[1])):
        part = list(group)
        text = "".join(char.data for _, char in part)
        fore, back, bold = style
        if back != BACK:
            yield Run(part[0][0], text, fore, back, bold)
        elif text.strip():
            lead = len(text) - len(text.lstrip())
            yield Run(part[0][0] + lead, text.strip(), fore, back, bold)


def style_of(char: Char) -> tuple[str, str, bool]:
    fore, back = colour(char.fg, FORE), colour(char.bg, BACK)
    if char.reverse:
        fore, back = back, fore
    return fore, back, char.bold


def colour(name: str, default: str) -> str:
    return default if name == "default" else NAMED.get(name, f"#{name}")


@dataclass(slots=True, kw_only=True)
class Session:
    """Commands run in a pseudo-terminal whose screen is recorded."""

    recording: Recording
    environment: dict[str, str]

    def run(self, command: str, keys: Sequence[tuple[float, str]] = (), limit_s: float = 90.0) -> None:
        """Type and run a command. keys: what is pressed, by seconds since the start."""
        self.recording.type(command)
        own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        process = subprocess.Popen(
            shlex.split(command),
            stdin=other,
            stdout=other,
            stderr=other,
            env=self.environment,
            cwd=self.environment["TMPDIR"],
            start_new_session=True,
        )
        os.close(other)
        try:
            self._watch(process, own, list(keys), limit_s)
        finally:
            if process.poll() is None:
                process.kill()
            os.close(own)
        if process.returncode:
            shown = "\n".join(line.rstrip() for line in self.recording.screen.display if line.strip())
            raise SystemExit(f"{command}: exit status {process.returncode}\n{shown}")

    def _watch(
        self, process: subprocess.Popen[bytes], terminal: int, keys: list[tuple[float, str]], limit_s: float
    ) -> None:
        stream, started = pyte.ByteStream(self.recording.screen), time.monotonic()
        sampled = started
        while True:
            ready, _, _ = select.select([terminal], [], [], 0.05)
            if ready:
                try:
                    data = os.read(terminal, 1 << 16)
                except OSError:  # the other end is closed
                    data = b""
                if not data:
                    break
                stream.feed(UNKNOWN.sub(b"", data))
            now = time.monotonic()
            while keys and now - started >= keys[0][0]:
                os.write(terminal, keys.pop(0)[1].encode())
            if now - sampled >= SAMPLE_S:
                self.recording.take(now - sampled)
                sampled = now
            if now - started > limit_s:
                raise SystemExit("a command did not end in time")
        process.wait(10)
        self.recording.take(0.6)


def drawn(recording: Recording, title: str) -> str:
    """Return the recording as an SVG."""
    frames = [(rows, min(seconds, LONGEST_S)) for rows, seconds in recording.frames]
    frames[-1] = (frames[-1][0], 3.0)
    total = sum(seconds for _, seconds in frames)
    classes: dict[tuple[str, bool], str] = {}
    defined: dict[tuple[Run, ...], str] = {}
    style, body, at = [], [], 0.0
    for number, (rows, seconds) in enumerate(frames):
        uses = []
        for y, row in enumerate(rows):
            if row:
                name = defined.setdefault(row, f"r{len(defined)}")
                uses.append(f'<use href="#{name}" y="{y * CELL_Y:g}"/>')
        begin, end = 100 * at / total, 100 * (at + seconds) / total
        at += seconds
        style.append(
            f"@keyframes k{number}{{0%{{visibility:{'visible' if number == 0 else 'hidden'}}}"
            f"{begin:.3f}%{{visibility:visible}}{end:.3f}%{{visibility:hidden}}}}"
            f"#f{number}{{animation:k{number} {total:.2f}s step-end infinite}}"
        )
        body.append(f'<g id="f{number}" class="f">{"".join(uses)}</g>')
    rows_drawn = "".join(
        f'<g id="{name}">{"".join(drawn_run(run, classes) for run in row)}</g>' for row, name in defined.items()
    )
    colours = "".join(
        f".{name}{{fill:{fore}{';font-weight:bold' if bold else ''}}}" for (fore, bold), name in classes.items()
    )
    font = "12px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
    width, height = COLUMNS * CELL_X + 2 * MARGIN, ROWS * CELL_Y + 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" viewBox="0 0 {width:g} {height:g}" role="img">'
        f"<title>{escape(title)}</title><style>text{{font:{font};white-space:pre}}"
        f".f{{visibility:hidden}}{colours}{''.join(style)}</style><defs>{rows_drawn}</defs>"
        f'<rect width="100%" height="100%" rx="8" fill="{BACK}"/>'
        f'<g transform="translate({MARGIN:g} {MARGIN:g})">{"".join(body)}</g></svg>\n'
    )


def drawn_run(run: Run, classes: dict[tuple[str, bool], str]) -> str:
    name = classes.setdefault((run.fore, run.bold), f"c{len(classes)}")
    x, width = run.x * CELL_X, len(run.text) * CELL_X
    back = "" if run.back == BACK else f'<rect x="{x:g}" width="{width:g}" height="{CELL_Y:g}" fill="{run.back}"/>'
    if not run.text.strip():
        return back
    return (
        f'{back}<text x="{x:g}" y="{CELL_Y - 4:g}" class="{name}" textLength="{width:g}">'
        f"{escape(run.text, quote=False)}</text>"
    )


def load(ended: threading.Event) -> None:
    """Send spoken requests, three at a time, until the event."""

    def ask(number: int) -> None:
        with MStarClient("http://127.0.0.1:8000") as client:
            while not ended.is_set():
                client.chat(
                    f"Question {number}: why is the sky blue?",
                    output_modalities=["text", "audio"],
                    max_output_tokens=48,
                    talker_max_tokens=72,
                    talker_temperature=0.0,
                )
                time.sleep(0.2 * number)

    for number in range(3):
        threading.Thread(target=ask, args=(number,), daemon=True).start()


def main() -> None:
    """Record the tour."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "tour.svg")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mt-", dir="/tmp") as folder:
        environment = {
            **os.environ,
            "MSTAR_RUNTIME_DIR": f"{folder}/run",
            "TMPDIR": folder,
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "COLUMNS": str(COLUMNS),
            "LINES": str(ROWS),
            "MSTAR_PLUGINS": "qwen3_omni",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        recording, ended = Recording(), threading.Event()
        session = Session(recording=recording, environment=environment)
        try:
            session.run("mstarctl up qwen3_omni:tiny -d --wait")
            session.run("mstarctl call qwen3_omni --text 'Why is the sky blue?' --out answer.wav")
            recording.take(1.0)
            recording.screen.reset()
            load(ended)
            session.run("mstarctl top qwen3_omni", [(6.0, "2"), (9.5, "3"), (11.0, "\r"), (14.0, "q")])
            ended.set()
            recording.screen.reset()
            session.run("mstarctl down qwen3_omni")
        finally:
            ended.set()
            subprocess.run(["mstarctl", "down", "--all", "--now"], env=environment, check=False, capture_output=True)
    text = drawn(recording, "mstarctl up, call, top and down, recorded in a terminal").replace(folder, "/tmp")
    options.out.write_text(text, encoding="utf-8")
    print(f"{options.out}: {len(recording.frames)} frames, {len(text) // 1024} KiB")


if __name__ == "__main__":
    main()
