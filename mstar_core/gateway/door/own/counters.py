"""Prometheus metrics of the gateway, and the merged text of its own and those of its deployments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from mstar_core.gateway.parts import ModelState, ModelStatus

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5, 30)
_SAMPLE: Final = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? (.+)")
_SUFFIX: Final = re.compile(r"_(?:total|bucket|sum|count|created)$")


class Counters:
    """Metrics that the door counts. Labels hold names of models and routes, never a client's text."""

    def __init__(self) -> None:
        self._own = own = CollectorRegistry()
        self.requests = Counter(
            "mstar_gateway_requests", "Requests by model, route and status.", ("model", "route", "status"), registry=own
        )
        self.added_s = Histogram(
            "mstar_gateway_added_seconds",
            "Time that the gateway adds before the first byte of an answer, loads and queues left out.",
            buckets=SECONDS,
            registry=own,
        )
        self.waited_s = Histogram(
            "mstar_gateway_waited_seconds",
            "Time that requests waited for their tenant's turn and for their model.",
            ("model",),
            buckets=(0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300),
            registry=own,
        )
        self.pieces = Counter("mstar_gateway_pieces", "Pieces of answers that were relayed.", registry=own)
        self.retries = Counter(
            "mstar_gateway_retries", "Requests that were sent to another replica before they began.", registry=own
        )
        self.broken = Counter(
            "mstar_gateway_broken_streams", "Answers that a deployment ended before their end.", registry=own
        )

    def text(self, statuses: Sequence[ModelStatus], others: Iterable[tuple[Mapping[str, str], str]]) -> str:
        """Return all metrics. others: labels and text of each deployment."""
        merged = MergedText()
        merged.add({}, generate_latest(self._own).decode())
        merged.add({}, "\n".join(_status_lines(statuses)))
        for labels, text in others:
            merged.add(labels, text)
        return merged.render()


def _status_lines(statuses: Sequence[ModelStatus]) -> Iterable[str]:
    yield "# HELP mstar_gateway_model_state 1 for the state of a model, else 0."
    yield "# TYPE mstar_gateway_model_state gauge"
    for status in statuses:
        for state in ModelState:
            labels = _labelled({"model": status.name, "state": str(state)})
            yield f"mstar_gateway_model_state{labels} {int(status.state is state)}"
    for name, kind, doc in (
        ("running", "gauge", "Requests of a model that run."),
        ("queued", "gauge", "Requests that wait for a model."),
        ("loads", "counter", "Times that a deployment of a model was started."),
        ("wakes", "counter", "Times that a model was woken from a sleep."),
    ):
        sample = f"mstar_gateway_{name}{'_total' if kind == 'counter' else ''}"
        yield f"# HELP {sample} {doc}"
        yield f"# TYPE {sample} {kind}"
        for status in statuses:
            yield f"{sample}{_labelled({'model': status.name})} {getattr(status, name)}"
    yield "# HELP mstar_gateway_held_bytes Bytes of a GPU that a model holds."
    yield "# TYPE mstar_gateway_held_bytes gauge"
    for status in statuses:
        for gpu, size in status.held.items():
            yield f"mstar_gateway_held_bytes{_labelled({'model': status.name, 'gpu': gpu})} {size}"


@dataclass(slots=True)
class MergedText:
    """Texts of several sources, with the samples of each family together, as the format requires.

    heads: comments by family. samples: lines by family.
    """

    heads: dict[str, list[str]] = field(default_factory=dict)
    samples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, labels: Mapping[str, str], text: str) -> None:
        """Add the text of one source. labels: added to each sample."""
        fresh: set[str] = set()
        for line in text.splitlines():
            if line.startswith("# "):
                _, kind, name, *_ = [*line.split(" ", 3), "", ""]
                if kind in ("HELP", "TYPE"):
                    if name not in self.heads:
                        fresh.add(name)
                        self.heads[name] = []
                    if name in fresh:
                        self.heads[name].append(line)
                continue
            found = _SAMPLE.fullmatch(line)
            if found is not None:
                self.samples.setdefault(self._family(found[1]), []).append(_relabelled(found, labels))

    def _family(self, sample: str) -> str:
        if sample in self.heads:
            return sample
        base = _SUFFIX.sub("", sample)
        return base if base in self.heads else sample

    def render(self) -> str:
        """Return the merged text."""
        lines = [line for name, lines in self.samples.items() for line in (*self.heads.get(name, []), *lines)]
        return "\n".join(lines) + "\n"


def _relabelled(found: re.Match[str], labels: Mapping[str, str]) -> str:
    name, own, value = found[1], found[2] or "", found[3]
    added = {key: text for key, text in labels.items() if f'{key}="' not in own}
    inner = ",".join(filter(None, (_labelled(added)[1:-1], own)))
    return f"{name}{{{inner}}} {value}" if inner else f"{name} {value}"


def _labelled(labels: Mapping[str, str]) -> str:
    """Return labels in their form; `{}` without any."""
    escaped = {key: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for key, text in labels.items()}
    return "{" + ",".join(f'{key}="{text}"' for key, text in escaped.items()) + "}"
