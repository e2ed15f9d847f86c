"""How a start or a life ended: the root cause, written where `up`, `ps` and `describe` find it after the supervisor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import ExitCode

FILE: Final = "outcome.json"


def outcome(deaths: list[dict[str, Any]], exit_code: ExitCode, reason: str) -> dict[str, Any]:
    """The earliest death is the cause, the rest followed by it. Times are one host's monotonic clock."""
    ordered = sorted(deaths, key=lambda record: float(record.get("monotonic", 0.0)))
    return {
        "exit_code": int(exit_code),
        "reason": reason,
        "cause": ordered[0] if ordered else None,
        "followed_by": [f"{r.get('name')}: {r.get('message')}" for r in ordered[1:]],
    }


def write_outcome(log_dir: Path, record: dict[str, Any]) -> None:
    """Write the outcome beside the logs."""
    (log_dir / FILE).write_text(json.dumps(record, indent=1, default=str))
