"""Global flags of the command line. The parser sets them; every command reads them through its Printer."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

FORMATS: Final = ("table", "wide", "json", "yaml", "name")


@dataclass(slots=True, kw_only=True)
class GlobalOptions:
    """Flags that every command takes, before or after its name. Owned by the context of one command line."""

    output: str = "table"
    color: bool = True
    quiet: bool = False
    verbose: bool = False
    debug: bool = False
    assume_yes: bool = False
    context: str | None = None
    socket: Path | None = None

    def is_coloured(self, stream: TextIO | None = None) -> bool:
        """Return whether `stream` (stdout) takes colour: a terminal, without --no-color and NO_COLOR."""
        target = sys.stdout if stream is None else stream
        return self.color and not os.environ.get("NO_COLOR") and target.isatty() and os.environ.get("TERM") != "dumb"
