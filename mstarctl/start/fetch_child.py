"""Fetches weights in a process of its own: a plugin's code may import anything. Run by `models fetch`.

`python -m mstarctl.start.fetch_child`, with {"target", "arguments"} on stdin; one JSON object a line on stdout:
{"done", "total", "file"} while it goes on, then {"folder"} or {"error"}.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import MstarError

REPORT_S: Final = 0.1


class ProgressReporter:
    """Tells how far a download is, at most ten times a second."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, done: int, total: int, file: str) -> None:
        now = time.monotonic()
        if now >= self._next or done >= total:
            self._next = now + REPORT_S
            tell({"done": done, "total": total, "file": file})


def tell(line: dict[str, Any]) -> None:
    """One line to whoever started this."""
    print(json.dumps(line), flush=True)


def tell_error(title: str, detail: str, hint: str = "", code: str = "weights", status: int = 3) -> None:
    """How it failed. status: the exit code of the command."""
    tell({"error": {"title": title, "detail": detail, "hint": hint, "code": code, "exit": status}})


def fetch(target: str, cache: str | None, tiny_folder: str | None) -> Path:
    """Call a plugin's function: one that makes the miniature in a folder, or one that finds official weights."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if tiny_folder is not None:
        return Path(function(Path(tiny_folder)))
    return Path(function(None, None if cache is None else Path(cache), ProgressReporter()))


def main() -> None:
    """Entry point. Always exits with 0 once it has told how it ended."""
    asked = json.load(sys.stdin)
    try:
        tell({"folder": str(fetch(asked["target"], asked["cache"], asked["tiny_folder"]))})
    except MstarError as error:
        tell_error(error.title, error.detail, error.hint, error.code, int(error.exit_code))
    except Exception as error:  # noqa: BLE001  the isolation boundary of one plugin's function
        tell_error("the weights could not be fetched", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
