"""Commands that tests run to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any


def output_of(command: Sequence[str], **options: Any) -> str:
    """Run a command and return its stdout. Raises AssertionError with its status and its output unless that is 0.

    options: of subprocess.run. stderr goes to the test's own if they say so.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run(command, **{**pipes, "text": True, "check": False, **options})
    told = "".join(f"\n{name}:\n{text}" for name, text in (("stdout", done.stdout), ("stderr", done.stderr)) if text)
    assert done.returncode == 0, f"{' '.join(command)} ended with status {done.returncode}{told}"
    return str(done.stdout)
