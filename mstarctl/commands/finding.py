"""What one check of `mstarctl doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OK: Final = "ok"
WARN: Final = "warn"
FAILED: Final = "failed"
NA: Final = "n/a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check. state: ok, warn, failed, or n/a where the host has no such thing."""

    name: str
    state: str
    detail: str
