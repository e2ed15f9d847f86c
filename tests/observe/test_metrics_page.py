"""docs/metrics.md and the Grafana dashboard: the page lists every exported family, and queries name only those."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mstar_core.observe.metrics import FAMILIES, SUFFIXES
from tests.fakes.commands import output_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs" / "grafana" / "deployment.json").read_text(encoding="utf-8"))
ALERTS = ROOT / "docs" / "grafana" / "alerts.yaml"
RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"][0]["rules"]
HTTP_PAGE = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
NAME = re.compile(r"\bmstar_\w+")
SERIES = {f"{name}{suffix}": family for name, family in FAMILIES.items() for suffix in SUFFIXES[family.kind]}
SCRAPED = {"job", "instance", "le"}
"""Labels that Prometheus adds, and the label of buckets."""

QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


def test_the_page_names_every_family_and_no_other() -> None:
    table = PAGE.partition("<!-- generated: metric-families -->")[2].partition("<!-- end")[0]
    assert set(NAME.findall(table)) == {
        f"{name}_total" if family.kind == "counter" else name for name, family in FAMILIES.items()
    }
    for name in set(NAME.findall(PAGE)) - {"mstar_step"}:  # a part of a name, in an example of --match
        assert name in SERIES or name in FAMILIES, name


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{title} {i}" for i, (title, _) in enumerate(QUERIES)])
def test_queries_of_the_dashboard_name_series_and_labels_of_the_api(title: str, query: str) -> None:
    names = NAME.findall(query)
    assert names, title
    for name in names:
        assert name in SERIES, f"{name} is not a series"
        assert SERIES[name].maker != "socket", f"{name} is not exported by the api, which Prometheus scrapes"
    known = set().union(*(SERIES[name].labels for name in names)) | SCRAPED
    grouped = {label for group in re.findall(r"by \(([\w, ]+)\)", query) for label in re.findall(r"\w+", group)}
    matched = set(re.findall(r'(\w+)=~?"', query))
    assert grouped <= known and matched <= known
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
    assert all(f'{name}{{job=~"$job"' in query for name in names)


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_alert_rules_name_series_labels_and_codes_of_the_api(rule: dict[str, Any]) -> None:
    query = rule["expr"]
    series = set(NAME.findall(query)) - {"mstar"}  # "mstar.*" is a pattern of job names
    for name in series:
        assert name in SERIES and SERIES[name].maker != "socket", f"{name} is not exported by the api"
    labels = set().union({"le", "job", "instance"}, *(SERIES[name].labels for name in series))
    grouped = {label for group in re.findall(r"by \(([\w, ]+)\)", query) for label in re.findall(r"\w+", group)}
    shown = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    assert grouped <= labels and shown <= (grouped or labels)
    for codes in re.findall(r'code=~?"([^"]+)"', query):
        for code in codes.split("|"):
            assert f"`{code}`" in HTTP_PAGE, f"{code} is not an error code of the api"
    assert rule["labels"]["severity"] in ("page", "ticket") and rule["annotations"]["summary"]


def test_prometheus_accepts_the_alert_rules() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("runs where Prometheus' promtool is installed")
    done = subprocess.run([tool, "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_legend_shows_labels_of_its_query() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            kept = {w for group in re.findall(r"by \(([\w, ]+)\)", target["expr"]) for w in re.findall(r"\w+", group)}
            assert shown <= (kept or set(SERIES[NAME.findall(target["expr"])[0]].labels)), panel["title"]


def test_panels_do_not_overlap_and_fit_the_grid() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & mine and all(x < 24 for x, _ in mine), panel["title"]
        cells |= mine
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_the_dashboard_has_the_main_metrics() -> None:
    asked = {
        "mstar_requests_total",
        "mstar_queue_seconds_bucket",
        "mstar_ttft_seconds_bucket",
        "mstar_ttfa_seconds_bucket",
        "mstar_inter_chunk_seconds_bucket",
        "mstar_real_time_factor_bucket",
        "mstar_step_seconds_bucket",
        "mstar_step_rows_sum",
        "mstar_kv_pages",
        "mstar_graph_steps",
        "mstar_transport_bytes_total",
        "mstar_restarts_total",
    }
    assert asked <= {name for _, query in QUERIES for name in NAME.findall(query)}


def test_the_supervisor_does_not_import_the_prometheus_client() -> None:
    code = "import sys, mstar_core.supervisor.main; print('prometheus_client' in sys.modules)"
    assert output_of([sys.executable, "-c", code]).strip() == "False"
