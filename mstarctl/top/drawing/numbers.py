"""Short number formats for cells; `-` for unknown values. Pure functions."""

from __future__ import annotations

from typing import Final

from mstarctl.output.units import age_text, size_text

NONE: Final = "-"


def ms(value: float | None) -> str:
    """Format milliseconds with three digits: `0.1`, `5.2`, `53.0`, `612`."""
    if value is None:
        return NONE
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def whole_ms(value: float | None) -> str:
    """Format whole milliseconds, for latencies: `231`."""
    return NONE if value is None else f"{value:.0f}"


def percent(share: float | None) -> str:
    """Format a share: `48 %`."""
    return NONE if share is None else f"{100 * share:.0f} %"


def age(seconds: float | None) -> str:
    """Format an age: `2.9s`, `2m05s`, `2h11m`."""
    if seconds is None:
        return NONE
    return f"{seconds:.1f}s" if seconds < 59.95 else age_text(seconds)


def rate(value: float | None) -> str:
    """Format a rate with at most four digits: `0.4`, `3.1`, `412`, `1184`, `18.6k`."""
    if value is None:
        return NONE
    if value < 9.95:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 9999.5 else f"{value / 1000:.1f}k"


def count(value: int | None) -> str:
    """Format a count; `-` for zero, so that active rows stand out."""
    return NONE if not value else str(value)


def amount(used: int | None, total: int | None) -> str:
    """Format `71.8/79.1 GiB`, or the used part alone."""
    if used is None:
        return NONE
    if not total:
        return size_text(used)
    number, unit = size_text(total).split(" ")
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}[unit]
    return f"{used / scale:.1f}/{number} {unit}"


def size(value: float | None) -> str:
    """Format a size: `2.4 MiB`."""
    return NONE if value is None else size_text(value)


def part(used: float | None, total: float | None) -> float | None:
    """Return used / total, None if either is unknown."""
    return None if used is None or not total else used / total
