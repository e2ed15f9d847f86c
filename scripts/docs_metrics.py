"""The generated table of docs/metrics.md, and the Grafana dashboard beside it: docs/grafana/deployment.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from docs_admin import table

PANEL_WIDTH, PANEL_HEIGHT, ROW_WIDTH = 8, 7, 24
SHOWN_AT = {"api": "both", "supervisor": "both", "socket": "socket"}


def families() -> str:
    """Every family in the order of the table in the code."""
    from mstar_core.observe.families import FAMILIES
    from mstar_core.observe.prometheus import SUFFIXES

    def cells(family: Any) -> Iterator[str]:
        suffix = SUFFIXES[family.kind][0] if family.kind == "counter" else ""
        yield f"`{family.name}{suffix}`"
        yield family.kind
        yield ", ".join(f"`{label}`" for label in family.labels)
        yield SHOWN_AT[family.maker]
        yield family.doc

    return table(("series", "type", "labels", "where", "is"), (cells(family) for family in FAMILIES.values()))


def buckets() -> str:
    """The bounds of each histogram."""
    from mstar_core.observe.families import FAMILIES

    found = [family for family in FAMILIES.values() if family.buckets]
    rows = ((f"`{family.name}`", ", ".join(f"{bound:g}" for bound in family.buckets)) for family in found)
    return table(("histogram", "upper bounds of its buckets"), rows)


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture: its queries with their legends, its unit in Grafana's words, and what it tells."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    doc: str
    kind: str = "timeseries"


JOB = '{job=~"$job"}'


def rate(name: str, by: str = "") -> str:
    """Growth per second, summed up by these labels."""
    return f"sum by ({by}) (rate({name}{JOB}[$__rate_interval]))" if by else f"sum(rate({name}{JOB}[$__rate_interval]))"


def quantile(share: float, name: str, by: str = "") -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', f'le, {by}' if by else 'le')})"


def both(name: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """The median and the 99th percentile."""
    legend = f"{{{{{by}}}}} " if by else ""
    return tuple((quantile(share, name, by), f"{legend}{word}") for share, word in ((0.5, "p50"), (0.99, "p99")))


def mean(name: str, by: str) -> str:
    """The mean of a histogram's values."""
    return f"{rate(f'{name}_sum', by)} / {rate(f'{name}_count', by)}"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Requests", (
        Panel("In flight and waiting", "short",
              ((f"sum(mstar_inflight{JOB})", "run"), (f"sum(mstar_queue_depth{JOB})", "wait")),
              "Requests that run, and that wait for a slot."),
        Panel("Answers", "reqps", ((rate("mstar_requests_total", "code"), "{{code}}"),),
              "Answers a second by error code; ok is none."),
        Panel("Refused and cancelled", "reqps",
              ((rate("mstar_rejected_total", "code"), "refused {{code}}"),
               (rate("mstar_cancelled_total", "cause"), "cancelled {{cause}}")),
              "A refusal by overloaded means that the queue was full."),
        Panel("Wait for a slot", "s", both("mstar_queue_seconds"), "From arrival until it runs."),
        Panel("Whole request", "s", both("mstar_request_seconds", "route"), "From arrival to end, by route."),
        Panel("Preprocessing", "short", ((f"sum(mstar_pool_busy{JOB})", "busy"),), "Pool processes that work."),
    )),
    ("What a listener or reader feels", (
        Panel("First output", "s", both("mstar_ttft_seconds", "modality"), "Time to the first output, by modality."),
        Panel("First sound", "s", both("mstar_ttfa_seconds"), "Time to the first sound."),
        Panel("Between outputs", "s", both("mstar_inter_chunk_seconds", "modality"), "Gaps inside an answer."),
        Panel("Real-time factor", "short", both("mstar_real_time_factor"),
              "Seconds taken per second of sound; above 1 a listener hears gaps."),
        Panel("Late sound", "s", both("mstar_stream_gap_seconds"),
              "How much later than its playback a chunk came; 0 is in time."),
        Panel("Made", "short",
              ((rate("mstar_tokens_total", "kind"), "{{kind}} tokens/s"),
               (rate("mstar_audio_seconds_total"), "seconds of sound/s")),
              "Tokens and seconds of sound, each second."),
    )),
    ("Nodes", (
        Panel("Step", "s", both("mstar_step_seconds", "node"), "Time of a step, from launch to result."),
        Panel("Steps", "ops", ((rate("mstar_step_seconds_count", "node"), "{{node}}"),), "Steps a second."),
        Panel("Batch", "short", ((mean("mstar_step_rows", "node"), "{{node}} mean"),
                                 (f"sum by (node) (mstar_batch_size{JOB})", "{{node}} last")), "Rows of a step."),
        Panel("Cache pages in use", "percentunit",
              (('sum by (node) (mstar_kv_pages{job=~"$job", state="used"}) / '
                'sum by (node) (mstar_kv_pages{job=~"$job", state="total"})', "{{node}}"),),
              "Full pools preempt."),
        Panel("Preempted", "short", ((rate("mstar_preempted_total", "node"), "{{node}}"),),
              "Requests a second whose pages were taken; each is computed again."),
        Panel("Steps replayed from graphs", "percentunit",
              ((f'sum by (node) (mstar_graph_steps{{job=~"$job", how="replayed"}}) / '
                f"sum by (node) (mstar_graph_steps{JOB})", "{{node}}"),
               ), "The others ran plainly."),
    )),
    ("Processes", (
        Panel("Up", "short", ((f"mstar_component_up{JOB}", "{{component}}"),), "1 while a process is there."),
        Panel("Restarts", "short", ((f"sum(mstar_restarts_total{JOB})", "restarts"),), "Since the deployment began."),
        Panel("Tensors handed on", "Bps", ((rate("mstar_transport_bytes_total", "component"), "{{component}}"),),
              "Bytes a second that a process gave to others."),
    )),
)  # fmt: skip


def dashboard() -> str:
    """The dashboard as Grafana imports it. It asks for the Prometheus data source when it is imported."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [], "id": len(panels) + 1,
                       "gridPos": {"x": 0, "y": y, "w": ROW_WIDTH, "h": 1}})  # fmt: skip
        y += 1
        for index, panel in enumerate(row):
            x = index * PANEL_WIDTH % ROW_WIDTH
            panels.append(_panel(panel, len(panels) + 1, x, y + index * PANEL_WIDTH // ROW_WIDTH * PANEL_HEIGHT))
        y += -(-len(row) * PANEL_WIDTH // ROW_WIDTH) * PANEL_HEIGHT
    made = {
        "__inputs": [{"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus",
                      "pluginName": "Prometheus", "description": "that scrapes the api's /metrics"}],
        "title": "mstarctl deployment",
        "uid": "mstar-deployment",
        "description": "One deployment, as its api's /metrics tells. Made by scripts/docs_metrics.py.",
        "tags": ["mstarctl"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_job()]},
        "panels": panels,
    }  # fmt: skip
    return json.dumps(made, indent=1) + "\n"


SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def _job() -> dict[str, Any]:
    return {
        "name": "job", "label": "deployment", "type": "query", "datasource": SOURCE, "refresh": 2, "sort": 1,
        "query": {"query": "label_values(mstar_inflight, job)", "refId": "job"}, "definition":
        "label_values(mstar_inflight, job)", "includeAll": True, "multi": True, "current": {},
    }  # fmt: skip


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


METRIC_PARTS: dict[str, Callable[[], str]] = {"metric-families": families, "metric-buckets": buckets}
METRIC_FILES: dict[str, Callable[[], str]] = {"docs/grafana/deployment.json": dashboard}
