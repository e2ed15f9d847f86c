"""Generated table of docs/metrics.md, and the Grafana dashboard docs/grafana/deployment.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from docs_admin import table

PANEL_WIDTH, PANEL_HEIGHT, ROW_WIDTH = 8, 7, 24
SHOWN_AT = {"api": "both", "supervisor": "both", "socket": "socket"}


def families() -> str:
    """Return the table of all families, in the order of the code."""
    from mstar_core.observe.metrics import FAMILIES, SUFFIXES

    def cells(family: Any) -> Iterator[str]:
        suffix = SUFFIXES[family.kind][0] if family.kind == "counter" else ""
        yield f"`{family.name}{suffix}`"
        yield family.kind
        yield ", ".join(f"`{label}`" for label in family.labels)
        yield SHOWN_AT[family.maker]
        yield family.doc

    return table(("series", "type", "labels", "where", "meaning"), (cells(family) for family in FAMILIES.values()))


def buckets() -> str:
    """Return the table of bucket bounds of each histogram."""
    from mstar_core.observe.metrics import FAMILIES

    found = [family for family in FAMILIES.values() if family.buckets]
    rows = ((f"`{family.name}`", ", ".join(f"{bound:g}" for bound in family.buckets)) for family in found)
    return table(("histogram", "upper bounds of its buckets"), rows)


def words() -> str:
    """Return the glossary."""
    from mstar_core.observe.glossary import GLOSSARY

    rows = ((f"`{term.word}`", term.unit, term.meaning) for term in GLOSSARY)
    return table(("word", "unit", "meaning"), rows)


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: title, Grafana unit, queries with their legends, and description."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    doc: str
    kind: str = "timeseries"


JOB = '{job=~"$job"}'


def rate(name: str, by: str = "") -> str:
    """Return a query of the growth per second, summed by these labels."""
    return f"sum by ({by}) (rate({name}{JOB}[$__rate_interval]))" if by else f"sum(rate({name}{JOB}[$__rate_interval]))"


def quantile(share: float, name: str, by: str = "") -> str:
    """Return a query of a histogram's quantile."""
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', f'le, {by}' if by else 'le')})"


def both(name: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """Return queries of the median and the 99th percentile, with legends."""
    legend = f"{{{{{by}}}}} " if by else ""
    return tuple((quantile(share, name, by), f"{legend}{word}") for share, word in ((0.5, "p50"), (0.99, "p99")))


def mean(name: str, by: str) -> str:
    """Return a query of a histogram's mean."""
    return f"{rate(f'{name}_sum', by)} / {rate(f'{name}_count', by)}"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Requests",
        (
            Panel(
                "In flight and waiting",
                "short",
                ((f"sum(mstar_inflight{JOB})", "run"), (f"sum(mstar_queue_depth{JOB})", "wait")),
                "Requests that run, and requests that wait for a slot.",
            ),
            Panel(
                "Answers",
                "reqps",
                ((rate("mstar_requests_total", "code"), "{{code}}"),),
                "Answers per second by error code; ok is success.",
            ),
            Panel(
                "Refused and cancelled",
                "reqps",
                (
                    (rate("mstar_rejected_total", "code"), "refused {{code}}"),
                    (rate("mstar_cancelled_total", "cause"), "cancelled {{cause}}"),
                ),
                "The code queue_full means that the queue was full.",
            ),
            Panel("Wait for a slot", "s", both("mstar_queue_seconds"), "From arrival to admission."),
            Panel("Whole request", "s", both("mstar_request_seconds", "route"), "From arrival to end, by route."),
            Panel("Preprocessing", "short", ((f"sum(mstar_pool_busy{JOB})", "busy"),), "Busy processes."),
        ),
    ),
    (
        "Client latency",
        (
            Panel("First output", "s", both("mstar_ttft_seconds", "modality"), "Time to the first output."),
            Panel("First audio", "s", both("mstar_ttfa_seconds"), "Time to the first audio."),
            Panel("Between outputs", "s", both("mstar_inter_chunk_seconds", "modality"), "Gaps inside an answer."),
            Panel(
                "Real-time factor",
                "short",
                both("mstar_real_time_factor"),
                "Duration per second of audio; above 1 a listener hears gaps.",
            ),
            Panel(
                "Late audio",
                "s",
                both("mstar_stream_gap_seconds"),
                "Delay of a chunk after its playback time; 0 is in time.",
            ),
            Panel(
                "Throughput",
                "short",
                (
                    (rate("mstar_tokens_total", "kind"), "{{kind}} tokens/s"),
                    (rate("mstar_audio_seconds_total"), "seconds of audio/s"),
                ),
                "Tokens and seconds of audio per second.",
            ),
        ),
    ),
    (
        "Nodes",
        (
            Panel("Step", "s", both("mstar_step_seconds", "node"), "Duration of a step, from launch to result."),
            Panel("Steps", "ops", ((rate("mstar_step_seconds_count", "node"), "{{node}}"),), "Steps per second."),
            Panel(
                "Batch",
                "short",
                (
                    (mean("mstar_step_rows", "node"), "{{node}} mean"),
                    (f"sum by (node) (mstar_batch_size{JOB})", "{{node}} last"),
                ),
                "Rows of a step.",
            ),
            Panel(
                "Cache pages in use",
                "percentunit",
                (
                    (
                        'sum by (node) (mstar_kv_pages{job=~"$job", state="used"}) / '
                        'sum by (node) (mstar_kv_pages{job=~"$job", state="total"})',
                        "{{node}}",
                    ),
                ),
                "Full pools preempt.",
            ),
            Panel(
                "Preempted",
                "short",
                ((rate("mstar_preempted_total", "node"), "{{node}}"),),
                "Preempted requests per second; each is computed again.",
            ),
            Panel(
                "Steps replayed from CUDA graphs",
                "percentunit",
                (
                    (
                        f'sum by (node) (mstar_graph_steps{{job=~"$job", how="replayed"}}) / '
                        f"sum by (node) (mstar_graph_steps{JOB})",
                        "{{node}}",
                    ),
                ),
                "The other steps run without a graph.",
            ),
        ),
    ),
    (
        "Processes",
        (
            Panel("Up", "short", ((f"mstar_component_up{JOB}", "{{component}}"),), "1 while a process is up."),
            Panel(
                "Restarts", "short", ((f"sum(mstar_restarts_total{JOB})", "restarts"),), "Since the deployment began."
            ),
            Panel(
                "Tensors sent",
                "Bps",
                ((rate("mstar_transport_bytes_total", "component"), "{{component}}"),),
                "Bytes per second that a process sent to others.",
            ),
        ),
    ),
)


def dashboard() -> str:
    """Return the dashboard for Grafana's import, which asks for the Prometheus data source."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "id": len(panels) + 1,
                "gridPos": {"x": 0, "y": y, "w": ROW_WIDTH, "h": 1},
            }
        )
        y += 1
        for index, panel in enumerate(row):
            x = index * PANEL_WIDTH % ROW_WIDTH
            panels.append(_panel(panel, len(panels) + 1, x, y + index * PANEL_WIDTH // ROW_WIDTH * PANEL_HEIGHT))
        y += -(-len(row) * PANEL_WIDTH // ROW_WIDTH) * PANEL_HEIGHT
    made = {
        "__inputs": [
            {
                "name": "DS_PROMETHEUS",
                "label": "Prometheus",
                "type": "datasource",
                "pluginId": "prometheus",
                "pluginName": "Prometheus",
                "description": "scrapes the api's /metrics",
            }
        ],
        "title": "mstarctl deployment",
        "uid": "mstar-deployment",
        "description": "One deployment, from its api's /metrics. Generated by scripts/docs_metrics.py.",
        "tags": ["mstarctl"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_job()]},
        "panels": panels,
    }
    return json.dumps(made, indent=1) + "\n"


SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def _job() -> dict[str, Any]:
    return {
        "name": "job",
        "label": "deployment",
        "type": "query",
        "datasource": SOURCE,
        "refresh": 2,
        "sort": 1,
        "query": {"query": "label_values(mstar_inflight, job)", "refId": "job"},
        "definition": "label_values(mstar_inflight, job)",
        "includeAll": True,
        "multi": True,
        "current": {},
    }


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.doc,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


METRIC_PARTS: dict[str, Callable[[], str]] = {
    "metric-families": families,
    "metric-buckets": buckets,
    "glossary": words,
}
METRIC_FILES: dict[str, Callable[[], str]] = {"docs/grafana/deployment.json": dashboard}
