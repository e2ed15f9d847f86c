"""Values of serve.yaml that have a form of their own: how long a model stays loaded, and replicas."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

DURATIONS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MOST_REPLICAS: Final = 64

_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_RANGE: Final = re.compile(r"(\d+)(?:\.\.(\d+))?")


class KeepKind(enum.StrEnum):
    """Rule by which a model leaves the devices."""

    ALWAYS = "always"
    IDLE = "idle"
    ON_DEMAND = "on_demand"


@dataclass(frozen=True, slots=True)
class Keep:
    """Time for which a model stays loaded. idle_s: seconds without a request until it sleeps."""

    kind: KeepKind
    idle_s: float | None = None


@dataclass(frozen=True, slots=True)
class Replicas:
    """The least and the most deployments of a model. They differ if replicas are added and removed by load."""

    least: int
    most: int


def parse_keep(text: str) -> Keep:
    """Parse `always`, `on_demand` or `idle 10m`. Raises ValueError; `read_serve` has checked the texts of a file."""
    word, _, rest = text.strip().partition(" ")
    if word == KeepKind.IDLE:
        return Keep(KeepKind.IDLE, parse_seconds(rest.strip()))
    if rest or word not in (KeepKind.ALWAYS, KeepKind.ON_DEMAND):
        raise ValueError(text)
    return Keep(KeepKind(word))


def parse_seconds(text: str) -> float:
    """Parse a duration such as `30s`, `10m` or `1h30m` into seconds. Raises ValueError."""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(text)
    return sum(float(number) * DURATIONS[unit] for number, unit in parts)


def parse_replicas(text: str) -> Replicas:
    """Parse `2` or `1..4`. Raises ValueError."""
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    least = int(found[1])
    most = least if found[2] is None else int(found[2])
    if not 1 <= least <= most <= MOST_REPLICAS:
        raise ValueError(text)
    return Replicas(least, most)
