"""Text of errors: what failed, why, what to try, the log, code and exit code. Called by main."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from mstar_core.errors import MstarError
from mstarctl.output.table import cell_width

_NEAREST = ("did you mean ", "choose one of: ")


def render_error(error: MstarError, *, width: int = 0) -> str:
    """Return the text of an error. width: column where the code ends; with 0 it follows the title after two spaces."""
    title, hint = error.title, error.hint
    if hint.startswith(_NEAREST[0]):
        title, hint = f"{title}; {hint}", ""
    lines = [_head(f"error: {title}", f"[{error.code.replace('_', '-')}, exit {int(error.exit_code)}]", width)]
    place = _place(error)
    if place and place not in f"{title} {error.detail}":
        lines.append(f"  {place}")
    lines += [f"  {line}" for line in error.detail.splitlines()]
    if hint:
        lines.append(f"  {hint}" if hint.startswith(_NEAREST[1]) else f"  try: {hint}")
    if error.facts.get("log"):
        lines.append(f"  log: {error.facts['log']}")
    return "\n".join(lines)


def _head(title: str, tag: str, width: int) -> str:
    first, *rest = title.splitlines() or [""]
    space = max(2, width - cell_width(first) - len(tag))
    return "\n".join([f"{first}{' ' * space}{tag}", *(f"  {line}" for line in rest)])


def _place(error: MstarError) -> str:
    file, line = error.facts.get("file"), error.facts.get("line")
    if not file:
        return ""
    return f"{file}:{line}" if line else str(file)


def state_dir() -> Path:
    """Return the directory of files that outlive a deployment: logs and saved tracebacks."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "mstar"


def save_traceback(error: BaseException) -> Path | None:
    """Save the traceback of an internal error. Returns its file, or None if no directory is writable."""
    text = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}  {sys.version.split()[0]}  {' '.join(sys.argv[:2])}\n"
    text += "".join(traceback.format_exception(error))
    for folder in (state_dir() / "crashes", Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(
                prefix=time.strftime("mstarctl-%Y-%m-%dT%H-%M-%S-"), suffix=".txt", dir=folder
            )
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            continue
        return Path(name)
    return None
