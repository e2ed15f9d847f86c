"""Histograms of a node's steps: counted flat in workers, summed up by the supervisor, shown by api and admin socket.

A worker tells how many steps fell into each bucket, as readings of the node, `took_0`, `took_1` and so on; a bucket
that is empty is told too, so that what a worker of before had told does not stay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mstar_core.observe.families import FAMILIES

if TYPE_CHECKING:
    from prometheus_client.core import Metric

SECONDS, ROWS = "mstar_step_seconds", "mstar_step_rows"
_PREFIX: Final = {SECONDS: "took", ROWS: "batched"}
_SUM: Final = {SECONDS: "busy_s", ROWS: "rows"}
"""The reading that is the sum of all values."""


@dataclass(slots=True)
class StepHistogram:
    """Steps by one of their sizes. Owned by a node's statistics. counts: by upper bound, then those above the last."""

    family: str
    counts: list[int] = field(init=False)
    _bounds: tuple[float, ...] = field(init=False)
    _names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._bounds = FAMILIES[self.family].buckets
        self._names = _names(self.family)
        self.counts = [0] * len(self._names)

    def add(self, value: float) -> None:
        """Count one step; a value on a bound belongs below it."""
        self.counts[bisect_left(self._bounds, value)] += 1

    def values(self) -> dict[str, float]:
        """Reading -> steps."""
        return {name: float(count) for name, count in zip(self._names, self.counts, strict=True)}


def _names(family: str) -> list[str]:
    return [f"{_PREFIX[family]}_{index}" for index in range(len(FAMILIES[family].buckets) + 1)]


READINGS: Final = frozenset({*_SUM.values(), *_names(SECONDS), *_names(ROWS)})
"""Readings of a node that the histograms are made of."""


def step_histograms(nodes: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    """Both families. nodes: name -> reading -> value; a node without steps is left out."""
    from prometheus_client.core import HistogramMetricFamily
    from prometheus_client.utils import floatToGoString

    def word(bound: float) -> str:
        return str(floatToGoString(bound))  # type: ignore[no-untyped-call]  # the library leaves it untyped

    for name in (SECONDS, ROWS):
        family = FAMILIES[name]
        bounds = [word(bound) for bound in (*family.buckets, float("inf"))]
        metric: Any = HistogramMetricFamily(name, family.doc, labels=family.labels)
        for node, readings in nodes.items():
            within, buckets = 0.0, []
            for bound, reading in zip(bounds, _names(name), strict=True):
                within += readings.get(reading, 0.0)
                buckets.append((bound, within))
            if within:
                metric.add_metric([node], buckets, readings.get(_SUM[name], 0.0))
        yield metric
