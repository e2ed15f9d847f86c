"""Charts and reports: axis values, titles, fonts, and pages that need nothing but themselves."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mstarctl.bench.load.plan import Load
from mstarctl.bench.null_server import NullBehaviour
from mstarctl.bench.result import ResultFolder, without_folders
from mstarctl.bench.show.chart import Chart, ChartLine, drawn, tick_text
from mstarctl.bench.show.picture import labels, write_png
from mstarctl.bench.show.plot import chart_of
from mstarctl.main import run
from tests.cli.bench.conftest import NullRun

CHART = Chart(
    title="a title",
    x_label="ttfa [ms]",
    y_label="samples [%]",
    right_label="pages [%]",
    lines=[
        ChartLine(name="one", points=[(0.0, 0.0), (1200.0, 50.0)]),
        ChartLine(name="two", points=[(0.0, 1.0), (900.0, 2.0)], is_right=True),
    ],
    marks=[(600.0, "goal")],
    bands=[(100.0, 300.0, "outage")],
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.012, "0.012"),
        (0.25, "0.25"),
        (1.0, "1"),
        (12.5, "12.5"),
        (300.0, "300"),
        (1200.0, "1200"),
        (8000.0, "8000"),
        (15_000.0, "15k"),
        (250_000.0, "250k"),
        (3e6, "3M"),
        (2e9, "2G"),
    ],
)
def test_axis_values_have_no_exponents(value: float, text: str) -> None:
    assert tick_text(value) == text


def test_every_axis_has_its_title() -> None:
    texts = {label.text: label.turn for label in labels(CHART)}
    assert (texts["ttfa [ms]"], texts["samples [%]"], texts["pages [%]"]) == (0, -90, 90)
    assert {"one", "two (right axis)", "goal", "outage"} <= texts.keys()
    assert not [text for text in texts if "e+" in text]
    assert "░ outage from 100 to 300" in " ".join(drawn(CHART))


def test_a_png_is_drawn_in_an_outline_font(tmp_path: Path) -> None:
    """Letters of a bitmap font have no shades between ink and ground."""
    write_png(CHART, tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as image:
        title = image.convert("L").crop((160, 10, 600, 60))
        assert len(set(title.tobytes())) > 20


@pytest.fixture
def result(null_run: NullRun) -> ResultFolder:
    load = Load(rate=40.0, arrivals="constant", requests=30, warm_up=0)
    return null_run(NullBehaviour(lines=4, gap_s=0.001), load)[1]


def test_a_title_counts_the_samples_of_its_chart(result: ResultFolder) -> None:
    assert "(n 30," in chart_of(result.path, "ttft").title
    assert "(n 90," in chart_of(result.path, "itl").title, "each answer of four lines has three gaps"


class Page(HTMLParser):
    """Tags and addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]


def with_facts(opened: ResultFolder, **facts: Any) -> None:
    path = opened.path / "result.json"
    path.write_text(json.dumps({**opened.facts, **facts}))


def test_a_report_is_one_page_without_scripts(result: ResultFolder, tmp_path: Path) -> None:
    with_facts(
        result,
        server_events=[{"at_s": 0.1, "type": "child.died", "child": "worker-0", "cause": "<killed>"}],
        slo="ttft<1s",
    )
    out = tmp_path / "page.html"
    assert run(["bench", "report", str(result.path), "-o", str(out)]) == 0
    text = out.read_text()
    page = Page(text)
    assert page.tags.count("svg") >= 3 and page.tags.count("html") == 1
    assert not page.addresses and not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)(?!127\.0\.0\.1)", text)
    assert "SERVER worker-0 died at 0.1 s: &lt;killed&gt;" in text
    for part in (
        "Over time",
        "Distributions",
        "Percentiles",
        "Environment",
        "Definitions",
        "prefers-color-scheme:dark",
    ):
        assert part in text


def test_a_report_of_a_sweep_has_its_points_and_its_knee(result: ResultFolder, tmp_path: Path) -> None:
    point = {
        "load": 8.0,
        "kind": "rate",
        "offered": 8.0,
        "throughput": 7.9,
        "goodput": 7.8,
        "is_good": True,
        "p50": 1.0,
        "is_over_saturated": False,
        "first": "ttft",
        "p99": 2.0,
        "statuses": {"ok": 30},
        "n": 30,
        "folder": result.path.name,
    }
    facts = {
        "schema": 1,
        "kind": "sweep",
        "slo": "ttft<1s",
        "knee": 8.0,
        "model": "m",
        "workload": "w",
        "points": [point],
        "warnings": ["windows of 1 s are short"],
    }
    (result.path.parent / "sweep.json").write_text(json.dumps(facts))
    assert run(["bench", "report", str(result.path.parent)]) == 0
    text = (result.path.parent / "report.html").read_text()
    assert "knee 8/s" in text.replace("8.00/s", "8/s") and "windows of 1 s are short" in text
    assert Page(text).tags.count("svg") >= 3 and "<details>" in text


def test_a_folder_without_a_result_has_no_report(tmp_path: Path) -> None:
    assert run(["bench", "report", str(tmp_path)]) == 3
    (tmp_path / "sweep.json").write_text("{}")
    assert run(["bench", "report", str(tmp_path)]) == 3


def test_results_name_no_folders_of_their_machine(result: ResultFolder, tmp_path: Path) -> None:
    for path in result.path.glob("*.json"):
        assert str(tmp_path) not in path.read_text()
    shortened = without_folders({"a": [f"{tmp_path}/x/orpheus.yaml", f"--out={tmp_path}/r1 --rate 4"]})
    assert shortened == {"a": ["orpheus.yaml", "--out=r1 --rate 4"]}
    kept = ["http://127.0.0.1:8000/tmp/x", "GET /v1/models/a", "tokens/s", "bench/results/gpu"]
    assert without_folders(kept) == kept
