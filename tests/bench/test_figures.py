"""Samples, percentiles, ratios, costs and tables of a measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.serving.compare import order_of, ratios
from bench.serving.figures import ROOT, Figures, command, head, summary, write
from bench.serving.load import Target
from bench.serving.spent import note_spent
from bench.serving.tables import tables


@pytest.mark.parametrize(
    ("count", "names"), [(1, {"p50"}), (99, {"p50"}), (100, {"p50", "p95"}), (500, {"p50", "p95", "p99"})]
)
def test_percentiles_need_samples(count: int, names: set[str]) -> None:
    actual = summary([float(value) for value in range(count)], "s")
    assert {name for name in actual if name.startswith("p")} == names
    assert (actual["min"], actual["max"], actual["n"], actual["unit"]) == (0.0, count - 1, count, "s")
    assert actual["p50"] == (count - 1) / 2


def test_a_file_and_its_samples(tmp_path: Path) -> None:
    figures = Figures()
    figures.add("one", [2.0, 1.0])
    figures.add("nothing", [])
    write({**head(), "metrics": figures.summary()}, figures.samples, tmp_path / "deep" / "run.json")
    report = json.loads((tmp_path / "deep" / "run.json").read_text())
    assert report["schema"] == 1 and {"commit", "dirty", "command", "when"} <= report.keys()
    assert {"gpu", "driver", "cuda", "torch", "python", "packages", "cpu", "cores"} <= report["env"].keys()
    assert list(report["metrics"]) == ["one"]
    assert json.loads((tmp_path / "deep" / "run.samples.json").read_text())["one"] == [2.0, 1.0]


def test_the_command_of_a_report_names_no_folder_of_the_host() -> None:
    script = str(ROOT / "bench" / "gpu_server.py")
    words = [
        script,
        "--folder",
        "/data/w/orpheus",
        "--compare-tree=/data/base",
        "--open",
        "",
        "--out",
        "/data/out/x.json",
    ]
    expected = "python bench/gpu_server.py --folder WEIGHTS/orpheus --compare-tree TREE/base --open '' --out OUT/x.json"
    assert command(words) == expected
    assert command([script, "--part", "/data/deep/part", "--out", "x.json", "--set", "a=/data/b"]) == (
        "python bench/gpu_server.py --part FOLDER/part --out x.json --set a=FOLDER/b"
    )


def test_two_deployments_take_turns_and_are_divided() -> None:
    assert order_of(["base", "changed"], 3) == ["base", "changed", "changed", "base", "base", "changed"]
    base = {"a": {"p50": 2.0}, "zero": {"p50": 0.0}, "gone": {"p50": 1.0}}
    assert ratios(base, {"a": {"p50": 3.0}, "zero": {"p50": 1.0}, "new": {"p50": 1.0}}) == {"a": 1.5}


def test_no_two_requests_share_a_prompt() -> None:
    target = Target(port=1, ids=9)
    texts = {target.body(number)["text"] for number in range(200)}
    assert len(texts) == 200
    assert len({len(text) for text in texts}) == 1, "the words are the same, so the lengths are"


CHANGED = {
    "worker-0.LLM.steps": 100.0,
    "worker-0.LLM.rows": 400.0,
    "worker-0.LLM.launch_s": 0.2,
    "worker-0.LLM.collect_s": 0.1,
    "worker-0.LLM.route_s": 0.1,
    "worker-0.LLM.busy_s": 1.5,
    "worker-0.LLM.graph_hits": 99.0,
    "worker-0.LLM.graph_misses": 1.0,
    "worker-0.idle_s": 0.5,
    "worker-0.wait_s": 1.0,
    "worker-0.snac.steps": 0.0,
    "api.pool_busy": 0.0,
}


def test_a_workers_time_is_split_without_a_hole() -> None:
    figures = Figures()
    note_spent(figures, "x", spent={"api": 0.5}, changed=CHANGED, loaded_s=1.0, elapsed_s=2.0)
    values = {name: actual[0] for name, actual in figures.samples.items()}
    assert values["LLM_launch_per_step_x"] == pytest.approx(0.002)
    assert values["LLM_rows_per_step_x"] == 4 and values["LLM_graph_hit_share_x"] == 0.99
    assert values["cpu_api_x"] == 0.5
    shares = [values[f"worker-0_{name}_share_x"] for name in ("steps", "wait", "idle", "rest")]
    assert shares == pytest.approx([0.2, 0.5, 0.25, 0.05]) and sum(shares) == pytest.approx(1)
    assert not [name for name in values if name.startswith("snac")], "a node that did not step has no time of a step"


def report(**changes: Any) -> dict[str, Any]:
    figures = Figures()
    figures.add("request_streams_8", [1.0] * 3)
    figures.add("first_audio_streams_8", [0.1, 0.2, 0.3])
    figures.add("ids_per_s_streams_8", [500.0], "1/s")
    note_spent(figures, "streams_8", spent={"api": 0.5}, changed=CHANGED, loaded_s=1.0, elapsed_s=2.0)
    conditions = {
        "model": "m",
        "phases": {"spawn": 1.5},
        "ready_s": 3,
        "errors": {},
        "held": {},
        "config": {"settings": ["a=1"]},
    }
    return {**head(), **conditions, "metrics": figures.summary(), "sections": {"streams_8": {}}, **changes}


def test_tables_hold_what_was_measured_and_nothing_else() -> None:
    text = tables(report())
    assert "| load | n | ids/s | first audio p50, ms | max, ms |" in text
    assert "| streams_8 | 3 | 500 | 200 | 300 |" in text
    assert "| a step of LLM |" in text and "Storm" not in text and "p95" not in text
    assert "errors none, held nothing" in text


def test_tables_of_a_comparison() -> None:
    base = report()
    compared = {"settings": ["a=2"], "metrics": base["metrics"], "ratios": {"ids_per_s_streams_8": 1.25}}
    assert "| ids_per_s_streams_8 | 500 | 500 | 1.250 | 1 |" in tables({**base, "compare": compared})
