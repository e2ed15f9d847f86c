"""Prometheus text out of plain numbers: the families of `families.py` filled with values. Used by api and admin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from mstar_core.messages.telemetry import MetricSample
from mstar_core.observe.families import FAMILIES, Family
from mstar_core.observe.step_histograms import step_histograms

SUFFIXES: Final = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
"""What samples of a family are called after its name. Times of creation are not told."""

Labelled = Mapping[Any, float | int | None]
"""Values by a tuple of the values of a family's labels; None is left out."""


def filled(name: str, values: Labelled) -> Metric:
    """A counter or gauge with these values. Raises KeyError for a name that is not in the table."""
    family = FAMILIES[name]
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric: Any = kind(name, family.doc, labels=family.labels)
    for labels, value in values.items():
        if value is not None:
            metric.add_metric(list(labels), float(value))
    return metric  # type: ignore[no-any-return]  # both are Metrics


def rebuilt(family: Family, samples: Iterable[MetricSample]) -> Metric:
    """A family of another process, out of the samples that it told."""
    metric = Metric(family.name, family.doc, family.kind)
    for sample in samples:
        metric.add_sample(sample.name, dict(zip(_label_names(sample.name, family), sample.labels, strict=True)),
                          sample.value)  # fmt: skip
    return metric


def samples_of(metrics: Iterable[Metric]) -> Iterator[MetricSample]:
    """What to tell of these metrics to another process."""
    for metric in metrics:
        family = FAMILIES[metric.name]
        told = {f"{metric.name}{suffix}" for suffix in SUFFIXES[family.kind]}
        for sample in metric.samples:
            if sample.name in told:
                labels = [sample.labels[name] for name in _label_names(sample.name, family)]
                yield MetricSample(sample.name, labels, sample.value)


def _label_names(sample: str, family: Family) -> tuple[str, ...]:
    return (*family.labels, "le") if sample.endswith("_bucket") else family.labels


class Timeless(Collector):
    """A registry's metrics without the times at which they were created: nothing in the table is called so."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Every metric of the registry."""
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class Told(Collector):
    """Families that another process makes, with the values that it told last. Owned by the api's metrics.

    steps: node -> reading -> value, of the histograms of steps.
    """

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[str, ...], float]] = {}
        self.steps: dict[str, dict[str, float]] = {}

    def put(self, name: str, labels: tuple[str, ...], value: float) -> None:
        """Set one value."""
        self.values.setdefault(name, {})[labels] = value

    def put_step(self, node: str, reading: str, value: float) -> None:
        """Set one reading of a node's steps."""
        self.steps.setdefault(node, {})[reading] = value

    def collect(self) -> Iterator[Metric]:
        """Every family that was told of."""
        for name, values in self.values.items():
            yield filled(name, values)
        if self.steps:
            yield from step_histograms(self.steps)
