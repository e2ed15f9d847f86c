"""The global flags, filled in while the command line is parsed and read by every command through its Printer."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

FORMATS: Final = ("table", "wide", "json", "yaml", "name")


@dataclass(slots=True, kw_only=True)
class GlobalOptions:
    """The flags that every verb takes, before or after its name. Lives in the context of one command line."""

    output: str = "table"
    color: bool = True
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    assume_yes: bool = False
    context: str | None = None
    socket: Path | None = None

    def is_coloured(self, stream: TextIO | None = None) -> bool:
        """Whether colour may be written to `stream` (stdout): a terminal, no --no-color, no NO_COLOR."""
        target = sys.stdout if stream is None else stream
        return self.color and not os.environ.get("NO_COLOR") and target.isatty() and os.environ.get("TERM") != "dumb"
