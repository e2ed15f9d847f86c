"""Lines that a user types or a pipe delivers, with editing, completion and a history that outlives the session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Final

from mstarctl.client.log_dirs import state_root

FOLDER: Final = ".chat"
"""Not a name of a deployment, whose logs are beside it."""
HISTORY: Final = "history"
MOST_LINES: Final = 2000
BLOCK: Final = '"""'
"""Opens and closes a message of several lines."""

Completer = Callable[[str, str], Iterator[str]]
"""Returns the continuations of a word: (line up to its end, word)."""


def history_file() -> Path:
    """Return the file of the messages and commands that were typed."""
    return state_root() / FOLDER / HISTORY


class ChatPrompt:
    """Reads messages from a terminal, or from a pipe. Owned by the session; `close` writes the history."""

    def __init__(self, *, is_terminal: bool, history: Path | None, complete: Completer, bold: bool) -> None:
        """history: file to read and append to, None for none. bold: colour prompts."""
        self._is_terminal, self._is_bold, self._history, self._new = is_terminal, bold, history, 0
        self._complete = complete
        self._readline: ModuleType | None = None
        if is_terminal:
            with suppress(ImportError):
                import readline

                self._readline = readline
                self._set_up(readline)

    def message(self) -> str:
        r"""Read one message: a line, lines that end with a backslash, or lines between two `\"\"\"`.

        Raises EOFError at the end of the input and KeyboardInterrupt for Ctrl-C.
        """
        first = self._line("> ")
        if first.strip().startswith(BLOCK):
            text = self._block(first.strip().removeprefix(BLOCK))
        else:
            text = first
            while text.endswith("\\"):
                text = f"{text[:-1]}\n{self._line('. ')}"
            text = text.strip()
        self._remember(text)
        return text

    def result(self, name: str) -> str:
        """Read the result of a function, which does not enter the history. Raises as `message`."""
        return self._line(f"result of {name}> ").strip()

    def close(self) -> None:
        """Append to the history file what was typed. A folder that cannot be written loses it."""
        if self._readline is None or self._history is None or not self._new:
            return
        with suppress(OSError):
            self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            self._readline.append_history_file(self._new, str(self._history))

    def _block(self, text: str) -> str:
        lines = [text] if text else []
        while not (lines and lines[-1].rstrip().endswith(BLOCK)):
            lines.append(self._line(". "))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        if self._is_terminal:
            return input(f"\x01\x1b[1m\x02{prompt}\x01\x1b[0m\x02" if self._is_bold else prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _remember(self, text: str) -> None:
        readline, line = self._readline, text.replace("\n", " ")
        if readline is None or not line:
            return
        count = readline.get_current_history_length()
        if count == 0 or readline.get_history_item(count) != line:
            readline.add_history(line)
            self._new += 1

    def _set_up(self, readline: ModuleType) -> None:
        if self._history is not None:
            readline.set_history_length(MOST_LINES)
            with suppress(OSError):
                readline.read_history_file(str(self._history))
        readline.set_auto_history(False)
        readline.set_completer_delims(" \t\n")
        readline.set_completer(self._completed)
        readline.parse_and_bind("tab: complete")

    def _completed(self, word: str, number: int) -> str | None:
        if self._readline is None:
            return None
        line = self._readline.get_line_buffer()[: self._readline.get_endidx()]
        found = list(self._complete(line, word))
        return found[number] if number < len(found) else None


def paths(start: str) -> Iterator[str]:
    """Yield the files and folders whose paths begin with `start`; folders end with a slash."""
    folder, _, name = start.rpartition("/")
    place = Path(folder or ("/" if start.startswith("/") else ".")).expanduser()
    with suppress(OSError):
        for entry in sorted(place.iterdir()):
            if entry.name.startswith(name) and (name or not entry.name.startswith(".")):
                yield f"{start[: len(start) - len(name)]}{entry.name}{'/' if entry.is_dir() else ''}"
