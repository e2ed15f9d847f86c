"""Child process of `models fetch`: it runs a plugin's download code, which may import anything.

`python -m mstarctl.start.fetch_child`, with {"target", "cache", "embedded_folder"} on stdin. It prints JSON lines:
{"done", "total", "file"} as progress, then {"folder"} or {"error"}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import MstarError
from mstar_core.targets import load_target

REPORT_S: Final = 0.1


class ProgressReporter:
    """Prints the progress of a download, at most ten times per second."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, done: int, total: int, file: str) -> None:
        now = time.monotonic()
        if now >= self._next or done >= total:
            self._next = now + REPORT_S
            send({"done": done, "total": total, "file": file})


def send(line: dict[str, Any]) -> None:
    """Print one JSON line for the parent process."""
    print(json.dumps(line), flush=True)


def send_error(title: str, detail: str, hint: str = "", code: str = "weights", status: int = 3) -> None:
    """Report a failure. status: exit code of the command."""
    send({"error": {"title": title, "detail": detail, "hint": hint, "code": code, "exit": status}})


def fetch(target: str, cache: str | None, embedded_folder: str | None) -> Path:
    """Call a plugin's function: it creates the embedded checkpoint in a directory, or downloads official weights."""
    function = load_target(target)
    if embedded_folder is not None:
        return Path(function(Path(embedded_folder)))
    return Path(function(None, None if cache is None else Path(cache), ProgressReporter()))


def main() -> None:
    """Entry point. The exit status is 0 whenever a result was reported."""
    asked = json.load(sys.stdin)
    try:
        send({"folder": str(fetch(asked["target"], asked["cache"], asked["embedded_folder"]))})
    except MstarError as error:
        send_error(error.title, error.detail, error.hint, error.code, int(error.exit_code))
    except Exception as error:  # noqa: BLE001  isolation boundary of a plugin's function
        send_error("the weights could not be downloaded", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
