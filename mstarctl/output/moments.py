"""Moments of a deployment's monotonic clock as times of day and ISO times. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

MOMENTS: Final = ("started", "ended")
"""Fields of a request that are seconds of its host's monotonic clock."""


def epoch_of(head: Mapping[str, Any]) -> float:
    """Return the time at which the clock of a deployment's host was 0. head: its part of a snapshot."""
    return float(head.get("started_at", 0.0)) - float(head.get("started", 0.0))


def dated(item: Mapping[str, Any], epoch_s: float) -> dict[str, Any]:
    """Return a request with start and end as ISO times in UTC. epoch_s: see `epoch_of`."""
    times = {key: item.get(key) for key in MOMENTS}
    return {**item, **{key: None if t is None else iso_time(epoch_s + t) for key, t in times.items()}}


def iso_time(seconds: float) -> str:
    """Format seconds since the epoch as `2026-11-23T04:51:56.123Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def time_of_day(iso: Any) -> str:
    """Return `04:51:56` in the time zone of the reader; empty for anything but an ISO time."""
    return "" if not isinstance(iso, str) else datetime.fromisoformat(iso).astimezone().strftime("%H:%M:%S")
