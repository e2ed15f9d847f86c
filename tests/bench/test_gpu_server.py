"""The measurement of the whole server, tried on the miniature and a CPU: every section, small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.serving.deployment import Plan, Served
from tests.fakes.ports import free_port
from tests.runtime.deployment import REPO

pytestmark = pytest.mark.timeout(600)
SMALL = (
    "--closed",
    "1:2,3:1",
    "--open",
    "1:2",
    "--burst",
    "3:1",
    "--storm",
    "40:6",
    "--storm-ids",
    "30",
    "--ids",
    "60",
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    out = tmp_path_factory.mktemp("figures") / "run.json"
    paths = os.pathsep.join((str(REPO), str(REPO / "plugins" / "mstar-orpheus" / "src")))
    done = subprocess.run(
        [
            sys.executable,
            "bench/gpu_server.py",
            "--tiny",
            "--device",
            "cpu",
            "--port",
            str(free_port()),
            *SMALL,
            "--param",
            "temperature=0.5",
            "--compare",
            "kv_cache.prefix_cache=false",
            "--out",
            str(out),
        ],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(out.with_suffix(".samples.json").read_text())
    return json.loads(out.read_text()), done.stdout


def test_every_section_has_its_figures(measured: tuple[dict[str, Any], str]) -> None:
    report, _ = measured
    assert set(report["sections"]) == {"streams_1", "streams_3", "open_1", "burst_3", "storm"}
    metrics = report["metrics"]
    assert metrics["first_audio_streams_1"]["n"] == 2 and metrics["first_audio_burst_3"]["n"] == 3
    for label in ("streams_1", "streams_3", "burst_3"):
        inside, all_of_it = (metrics[f"first_audio{part}_{label}"]["p50"] for part in ("_in_api", ""))
        assert 0 < inside < all_of_it
        assert metrics[f"sound_each_{label}"]["min"] == metrics[f"sound_each_{label}"]["max"] > 0
        assert metrics[f"LLM_steps_{label}"]["p50"] >= 59 and metrics[f"cpu_client_{label}"]["p50"] < 0.5
        shares = [metrics[f"worker-0_{name}_share_{label}"]["p50"] for name in ("steps", "wait", "idle", "rest")]
        assert sum(shares) == pytest.approx(1) and min(shares) > -0.2


def test_the_storm_leaves_nothing_and_loses_nobody(measured: tuple[dict[str, Any], str]) -> None:
    storm = measured[0]["sections"]["storm"]
    assert sum(storm["outcomes"].values()) == 40 and "" in storm["outcomes"]
    assert storm["outcomes"].keys() <= {"", "left"}  # on a quick machine few are still under way when they would leave
    assert (storm["held"], storm["unaccounted"]) == ({}, 0)
    assert set(storm["grown_bytes"]) == {"api", "conductor", "supervisor", "worker-0"}


def test_conditions_and_ratios_stand_beside_the_figures(measured: tuple[dict[str, Any], str]) -> None:
    report, printed = measured
    keys = {
        "env",
        "model",
        "dims",
        "placement",
        "config",
        "workload",
        "warmup",
        "n",
        "ready_s",
        "phases",
        "mem",
        "errors",
    }
    assert keys <= report.keys() and report["errors"] == {} and report["held"] == {}
    assert report["config"]["request"]["temperature"] == 0.5
    assert report["compare"]["settings"] == ["kv_cache.prefix_cache=false"]
    assert "ids_per_s_streams_3" in report["compare"]["ratios"]
    assert "| load | n |" in printed and "| median | base |" in printed


def test_another_tree_comes_first_on_the_path_of_every_process(tmp_path: Path) -> None:
    (tmp_path / "plugins" / "mstar-orpheus" / "src").mkdir(parents=True)
    plan = Plan(model="orpheus:tiny", device="cpu", port=1, root=tmp_path, tree=tmp_path)
    paths = Served(plan).environment()["PYTHONPATH"].split(os.pathsep)
    assert paths[:2] == [str(tmp_path), str(tmp_path / "plugins" / "mstar-orpheus" / "src")]


def test_a_deployment_that_does_not_start_leaves_the_figures_of_the_others(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    done = subprocess.run(
        [
            sys.executable,
            "bench/gpu_server.py",
            "--tiny",
            "--device",
            "cpu",
            "--port",
            str(free_port()),
            "--closed",
            "1:1",
            "--open",
            "",
            "--burst",
            "",
            "--ids",
            "30",
            "--compare",
            "no_such_key=1",
            "--out",
            str(out),
        ],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(out.read_text())
    assert done.returncode == 1 and report["errors"] == {"changed_deployment": 1}, done.stderr[-3000:]
    assert report["metrics"]["first_audio_streams_1"]["n"] == 1 and report["compare"]["error"]


def test_a_file_of_figures_is_printed_again(measured: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(measured[0]))
    again = subprocess.run(
        [sys.executable, "bench/gpu_report.py", str(path)],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert measured[1].strip() in again.stdout
