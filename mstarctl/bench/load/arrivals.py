"""ReceivedChunk times of open loads, drawn from a seed before the first request is sent. Pure functions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from mstar_core.errors import UsageError, did_you_mean

KINDS: Final = ("poisson", "constant", "gamma")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Process of arrivals. shape: of the gamma distribution of gaps; 1 is Poisson, below 1 makes bursts."""

    kind: str
    rate: float
    shape: float = 1.0

    @classmethod
    def parse(cls, text: str, rate: float) -> Arrivals:
        """Parse `poisson`, `constant` or `gamma:SHAPE`. Raises UsageError."""
        kind, colon, shape = text.partition(":")
        if kind not in KINDS or (kind == "gamma") != bool(colon):
            raise UsageError(f"--arrivals is {text!r}", hint=did_you_mean(kind, ("poisson", "constant", "gamma:0.5")))
        try:
            exponent = float(shape) if colon else 1.0
        except ValueError:
            exponent = 0.0
        if exponent <= 0 or rate <= 0:
            raise UsageError(f"--arrivals {text} at {rate:g}/s", hint="rate and shape must be above 0")
        return cls(kind=kind, rate=rate, shape=exponent)

    def __str__(self) -> str:
        shape = f":{self.shape:g}" if self.kind == "gamma" else ""
        return f"{self.kind}{shape} {self.rate:g}/s"

    def gaps(self, chance: random.Random) -> Iterator[float]:
        """Yield the gaps between arrivals in seconds, without end."""
        mean = 1 / self.rate
        while True:
            match self.kind:
                case "constant":
                    yield mean
                case "gamma":
                    yield chance.gammavariate(self.shape, mean / self.shape)
                case _:
                    yield chance.expovariate(self.rate)


def schedule(
    arrivals: Arrivals, seed: int, *, count: int | None = None, span_s: float | None = None, ramp_s: float = 0.0
) -> list[float]:
    """Return the intended times in seconds, ascending: `count` measured requests, or those within `span_s`.

    During the first `ramp_s` seconds the rate rises linearly from 0; requests of the ramp come on top. A gap of the
    process is stretched so that the expected number of arrivals until time t is rate * t^2 / (2 * ramp).
    """
    chance = random.Random(f"arrivals/{seed}")
    times: list[float] = []
    busy_s = 0.0  # time of the process at its full rate
    measured = 0
    for gap in arrivals.gaps(chance):
        busy_s += gap
        at = _stretched(busy_s, ramp_s)
        if span_s is not None and at >= ramp_s + span_s:
            break
        if count is not None and measured == count:
            break
        times.append(at)
        measured += at >= ramp_s
    return times


def _stretched(busy_s: float, ramp_s: float) -> float:
    """Return the time at which a ramp has done `busy_s` seconds of work at the full rate."""
    half = ramp_s / 2
    return (2 * ramp_s * busy_s) ** 0.5 if busy_s < half else busy_s + half


def ticks(period_s: float, clients: int, span_s: float) -> list[list[float]]:
    """Return the ticks of each of `clients` control loops within `span_s`, with phases spread over one period."""
    count = int(span_s / period_s)
    return [[(client / clients + number) * period_s for number in range(count)] for client in range(clients)]


def replayed(times: Sequence[float], speed: float) -> list[float]:
    """Return the times of a trace relative to its first request, at `speed`. Raises UsageError for unordered times."""
    if any(later < earlier for earlier, later in itertools.pairwise(times)):
        raise UsageError("the times of the trace decrease", hint="sort its lines by t")
    return [(at - times[0]) / speed for at in times]
