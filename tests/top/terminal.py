"""A pseudo-terminal for tests, with the part of a screen that Textual uses. It reads in a thread."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from mstarctl.output.line import cells

TOKEN: Final = re.compile(
    r"\x1b\[(?P<private>[<=>?]?)(?P<numbers>[\d;:]*)(?P<middle>[ !\"$'*]?)(?P<end>[@-~])"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[PX^_][^\x1b]*\x1b\\"
    r"|\x1b[()][0-9A-Za-z]|\x1b[=>78cDEM]"
    r"|(?P<control>[\x00-\x1a\x1c-\x1f\x7f])|(?P<text>[^\x00-\x1f\x7f]+)"
)
LIMIT_S: Final = 120.0
KEYS: Final = {"down": "\x1b[B", "up": "\x1b[A", "enter": "\r", "escape": "\x1b"}


class Terminal:
    """Runs a command in `width` x `height` cells. modes: private modes that are on (1049: alternate screen)."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, width: int = 80, height: int = 24) -> None:
        self.width, self.height = width, height
        self.rows = [[" "] * width for _ in range(height)]
        self.modes: set[str] = set()
        self._x = self._y = 0
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self._slave = slave
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            command,
            env={**env, "TERM": "xterm-256color", "COLORTERM": ""},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        self._rest = ""
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def text(self) -> str:
        """Text of the screen."""
        return "\n".join("".join(row) for row in self.rows)

    @property
    def attributes(self) -> list[object]:
        """Current settings of the terminal: echo, line mode, and so on."""
        return list(termios.tcgetattr(self._slave))

    def press(self, *keys: str) -> None:
        """Send keys, by name or as text."""
        for key in keys:
            os.write(self._master, KEYS.get(key, key).encode())
            time.sleep(0.15)  # an escape directly before another key starts an escape sequence

    def shows(self, text: str, within_s: float = LIMIT_S) -> None:
        """Wait until the screen contains `text`. Fails with its content."""
        self.until(lambda: text in self.text, f"no {text!r}", within_s)

    def hides(self, text: str, within_s: float = LIMIT_S) -> None:
        """Wait until the screen no longer contains `text`."""
        self.until(lambda: text not in self.text, f"still {text!r}", within_s)

    def until(self, is_so: Callable[[], bool], otherwise: str, within_s: float = LIMIT_S) -> None:
        """Wait for a condition. Fails with `otherwise` and the content of the screen."""
        end = time.monotonic() + within_s
        while not is_so():
            assert time.monotonic() < end, f"{otherwise} after {within_s:g} s on\n{self.text}"
            assert self.process.poll() is None or is_so(), f"it ended with\n{self.text}"
            time.sleep(0.02)

    def close(self) -> None:
        """End the command and free the terminal."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
        os.close(self._slave)
        os.close(self._master)

    def _read(self) -> None:
        pending = b""
        while True:
            try:
                pending += os.read(self._master, 65536)
            except OSError:
                return
            cut = max(pending.rfind(b"\n"), 0) if len(pending) > 1 << 20 else len(pending)
            try:
                text, pending = pending[:cut].decode(), pending[cut:]
            except UnicodeDecodeError:  # an incomplete character
                continue
            self._take(self._rest + text)

    def _take(self, text: str) -> None:
        at = 0
        while at < len(text):
            token = TOKEN.match(text, at)
            if token is None:
                break
            at = token.end()
            if token["text"]:
                self._put(token["text"])
            elif token["control"]:
                self._control(token["control"])
            elif token["end"]:
                self._sequence(token["private"], token["numbers"], token["end"])
        self._rest = text[at:]

    def _put(self, text: str) -> None:
        for char in text:
            if 0 <= self._y < self.height and 0 <= self._x < self.width:
                self.rows[self._y][self._x] = char
            self._x += cells(char)

    def _control(self, char: str) -> None:
        if char == "\r":
            self._x = 0
        elif char == "\n":
            self._y += 1
            if self._y >= self.height:
                self.rows = [*self.rows[1:], [" "] * self.width]
                self._y = self.height - 1

    def _sequence(self, private: str, numbers: str, end: str) -> None:
        values = [int(n) if n.isdigit() else 0 for n in numbers.split(";")]
        match private, end:
            case "?", "h":
                self.modes |= set(numbers.split(";"))
            case "?", "l":
                self.modes -= set(numbers.split(";"))
                if "1049" in numbers:
                    self._clear()
            case "", "H":
                self._y, self._x = (values[0] or 1) - 1, ((values[1] if len(values) > 1 else 1) or 1) - 1
            case "", "J":
                self._clear()
            case "", "K":
                if 0 <= self._y < self.height:
                    self.rows[self._y][self._x :] = [" "] * (self.width - self._x)

    def _clear(self) -> None:
        self.rows = [[" "] * self.width for _ in range(self.height)]
