"""Human-readable numbers: sizes in binary units, durations in the largest two units, counted nouns. Pure functions."""

from __future__ import annotations

import math
from typing import Final

_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(size_bytes: float) -> str:
    """Format bytes in binary units with one decimal: `512 B`, `1.5 GiB`."""
    value = float(size_bytes)
    for unit in _SIZES:
        if abs(value) < 1024 or unit == _SIZES[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit fits every size")


def duration_text(seconds: float) -> str:
    """Format a duration: `38 ms`, `5.4 s`, `2m05s`, `2h11m`, `3d04h`."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0:
        return f"-{duration_text(-seconds)}"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return _two_units(round(seconds))


def age_text(seconds: float) -> str:
    """Format a coarse age for tables: `9s`, `2m05s`, `2h11m`, `3d04h`."""
    whole = max(0, int(seconds))
    return f"{whole}s" if whole < 60 else _two_units(whole)


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: `1 request`, `2 requests`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _two_units(seconds: int) -> str:
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    return f"{hours}h{minute:02d}m" if hours else f"{minutes}m{second:02d}s"
