"""Durations on the command line: `30`, `1.5s`, `10m`, `2h`, `1h30m`. Used by every option that takes one."""

from __future__ import annotations

import re
from typing import Final

from mstar_core.errors import UsageError

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration(text: str, option: str) -> float:
    """Parse a duration into seconds. A plain number means seconds. Raises UsageError that names the option."""
    word = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", word):
        return float(word)
    parts = _PART.findall(word)
    if not parts or "".join(number + unit for number, unit in parts) != word:
        raise UsageError(f"{option} is {text!r}", hint="write a duration such as 30s, 10m or 2h")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)
