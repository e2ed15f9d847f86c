"""Result of one check of `mstarctl doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OK: Final = "ok"
WARN: Final = "warn"
FAILED: Final = "failed"
NA: Final = "n/a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check. state: ok, warn, failed, or n/a if the check does not apply to the host."""

    name: str
    state: str
    detail: str
