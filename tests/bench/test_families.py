"""The measurements of Pi0.5 and V-JEPA 2, tried with small sizes on a CPU: all but speed is known without a GPU."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.families.clip_requests import checkpoint_shapes
from bench.families.clock import family
from bench.families.policy import Acting, Place, checkpoint_modules, floors, observation, random_modules
from bench.families.robots import write_checkpoint
from bench.families.sections import Sections
from bench.families.timeline import Span, told
from bench.families.world import encode_operations, step_seconds
from bench.serving.deployment import Plan, Served
from bench.serving.figures import Figures
from mstar_pi05.checkpoint.config import Sizes, Tower, Vision
from mstar_vjepa2.checkpoint.config import ENCODERS, RELEASED_AC
from tests.fakes.ports import free_port
from tests.runtime.deployment import REPO

pytestmark = pytest.mark.timeout(300)
H100 = {"product_per_s": 780e12, "copy_bytes_per_s": 3.0e12}
SMALL = Sizes(
    vocab=300,
    prompt_ids=96,
    horizon=10,
    vision=Vision(width=32, layers=2, heads=2, mlp=64, image_size=28, patch_size=14),
    language=Tower(width=48, layers=2, mlp=96, heads=4, kv_heads=1, head_dim=16),
    expert=Tower(width=32, layers=2, mlp=64, heads=4, kv_heads=1, head_dim=16),
)


def measured(out: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", *words, "--tiny", "--device", "cpu", "--out", str(out)],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert json.loads(out.with_suffix(".samples.json").read_text())
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


@pytest.mark.slow
def test_the_policy_at_its_engines(tmp_path: Path) -> None:
    words = ("--part", "engines", "--vision", "float32", "--batch", "1", "2", "--repeats", "3", "--clients", "3")
    report = measured(tmp_path / "pi05.json", "bench.gpu_pi05", *words)
    sections, metrics = report["sections"], report["metrics"]
    assert not any("error" in section for section in sections.values())
    hits = sections["float32_torch_captured_rows_2"]["result"]["counters"]
    assert hits["LLM"]["graph_hits"] >= 3 and hits["vit_encoder"]["graph_hits"] >= 3
    assert sections["float32_torch_plain_rows_1"]["result"]["counters"]["LLM"] == {}
    for label in ("float32_torch_captured", "float32_torch_plain"):
        names = {f"engines_{label}_rows_1", f"engines_{label}_rows_2", f"engines_{label}_two_cameras"}
        names |= {f"part_{label}_{part}" for part in ("cameras", "prefix", "flow")}
        assert names | {f"engines_{label}_chunks_per_s_clients_3"} <= set(metrics)
        for part in ("cameras", "prefix", "flow", "request"):
            profile = sections[f"{label}_profile_{part}"]["result"]
            assert profile["launches"] > 0 and profile["slowest"]
        assert all(value > 0 for value in sections[f"{label}_parts"]["result"]["floors_s"].values())


def test_the_policy_at_its_server(tmp_path: Path) -> None:
    words = ("--part", "server", "--vision", "float32", "--alone", "2", "--clients", "2", "--each", "2")
    report = measured(tmp_path / "pi05.json", "bench.gpu_pi05", *words, "--port", str(free_port()))
    assert report["metrics"]["server_float32_alone"]["n"] == 2
    assert report["metrics"]["server_float32_clients_2"]["n"] == 4
    actual = report["sections"]["server_float32"]["result"]
    assert not actual["held"] and not actual["captured_while_measured"]
    stations = ("api_prepare", "worker-0_vit_encoder_prefill", "worker-0_LLM_prefill", "worker-0_LLM_action_gen")
    ends = [report["metrics"][f"station_{station}_end_server_float32_alone"]["p50"] for station in stations]
    assert 0 < ends[0] and ends == sorted(ends), "a request comes through them in this order"


@pytest.mark.slow
def test_robots_before_two_servers_in_turn(tmp_path: Path) -> None:
    words = ("--tree", str(REPO), "--windows", "1", "--alone", "2", "--clients", "2", "--each", "1", "--set")
    report = measured(tmp_path / "robots.json", "bench.gpu_robots", *words, "--port", str(free_port()))
    for side in ("before", "now"):
        assert report["metrics"][f"{side}_npy_alone"]["n"] == report["metrics"][f"{side}_clients_2"]["n"] == 2
        assert report["metrics"][f"station_api_prepare_end_{side}_png_alone"]["p50"] > 0
        assert report["sections"][f"start_{side}"]["result"]["ready_s"] > 0


def test_a_measurement_that_is_ended_stops_its_deployment(tmp_path: Path) -> None:
    port = free_port()
    program = (
        "import time; from pathlib import Path; from bench.serving.deployment import Plan, Served\n"
        f"with Served(Plan(model='vjepa2_ac:tiny', device='cpu', port={port}, root=Path({str(tmp_path)!r}))) as it:\n"
        "    print(it.pids['worker-0'], flush=True); time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = next(int(line) for line in process.stdout if line.strip().isdigit())
        assert Path(f"/proc/{worker}").exists()
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{worker}").exists()


def test_rollouts_of_two_trees_in_turn(tmp_path: Path) -> None:
    words = ("--tree", str(REPO), "--rollout", "2:1:3", "1:2:2", "--rounds", "2", "--each", "1")
    metrics = measured(tmp_path / "rollouts.json", "bench.gpu_rollouts", *words)["metrics"]
    names = {
        f"{side}_{part}_{kind}"
        for side in ("before", "now")
        for part in ("context", "steps", "whole", "replays")
        for kind in ("2_1_3", "1_2_2")
    }
    assert names == set(metrics) and all(metrics[name]["n"] == 2 for name in names)
    assert metrics["now_steps_2_1_3"]["p50"] > 0


def test_the_world_model(tmp_path: Path) -> None:
    words = (
        "--clips",
        "1",
        "2",
        "--frames",
        "1",
        "2",
        "--repeats",
        "3",
        "--seconds",
        "0.1",
        "--cached",
        "2",
        "--rollout",
        "3:1:4",
        "2:3:2",
        "--profiled",
        "2:3:2",
    )
    report = measured(tmp_path / "vjepa2.json", "bench.gpu_vjepa2", *words)
    names = {"tiny_clips_2", "tiny_share_of_bound_1", "frames_captured_2", "frames_plain_1", "attention_pages_cached_2"}
    names |= {f"rollout_steps_{kind}_context_3_candidates_1_steps_4" for kind in ("captured", "plain")}
    assert names <= set(report["metrics"])
    sections = report["sections"]
    counters = sections["rollout_captured_context_2_candidates_3_steps_2"]["result"]["counters"]["ac_predictor"]
    assert counters["graph_hits"] > 3
    for name in ("tiny_profile", "profile_captured_context_2_candidates_3_steps_2"):
        profile = sections[name]["result"]
        assert profile["launches"] > 10 and profile["slowest"] and profile["idle_s"] >= 0


@pytest.mark.slow
def test_video_models_at_their_server(tmp_path: Path) -> None:
    words = ("--part", "server", "--alone", "2", "--clients", "2", "--each", "1", "--port", str(free_port()))
    report = measured(tmp_path / "server.json", "bench.gpu_vjepa2", *words)
    sections, metrics = report["sections"], report["metrics"]
    assert not any("error" in section for section in sections.values())
    kinds = {
        "vjepa2": ("video_mean", "pixels_mean", "pixels_all"),
        "vjepa2_ac": ("steps", "last_frame", "candidates_4", "candidates_12", "plan_24"),
    }
    for model, names in kinds.items():
        assert not sections[f"server_{model}"]["result"]["held"]
        for name in names:
            label = f"server_{model}_{name}"
            assert metrics[f"{label}_alone"]["n"] == metrics[f"{label}_clients_2"]["n"] == 2
            assert 0 < metrics[f"{label}_alone_first"]["min"] <= metrics[f"{label}_alone"]["max"]


def test_a_section_that_fails_leaves_the_others_and_its_cause(tmp_path: Path) -> None:
    report: dict[str, Any] = {}
    sections = Sections(report, Figures(), tmp_path / "out.json")
    assert sections.run("bad", lambda: 1 // 0) is None and sections.run("good", lambda: {"made": 3}) == {"made": 3}
    written = json.loads((tmp_path / "out.json").read_text())["sections"]
    assert "ZeroDivisionError" in written["bad"]["error"] and written["good"]["result"] == {"made": 3}
    assert sections.failed == ["bad"]


def test_a_timeline_tells_gaps_and_what_overlaps() -> None:
    us = 1e-6
    spans = [Span(0, 10 * us, "gemm_a"), Span(5 * us, 12 * us, "copy_b"), Span(40 * us, 50 * us, "gemm_a")]
    actual = told(spans)
    assert actual["span_s"] == pytest.approx(50 * us) and actual["busy_s"] == pytest.approx(22 * us)
    assert [(gap["after"], gap["before"]) for gap in actual["gaps"]] == [("copy_b", "gemm_a")]
    assert actual["slowest"][0] == {"name": "gemm_a", "s": pytest.approx(20 * us), "calls": 2}
    assert actual["gaps_us"] == {"2": 1, "5": 1, "20": 1, "100": 0} and told([]) == {"launches": 0}


@pytest.mark.parametrize("model", ["vjepa2", "vjepa2_ac"])
def test_checkpoints_of_the_video_models_have_every_published_tensor(model: str) -> None:
    """By shapes alone: the released ones take gigabytes."""
    actual = checkpoint_shapes(model)
    assert (
        sum(math.prod(shape) for shape in actual.values())
        == {"vjepa2": 303_885_312 + 22_086_016, "vjepa2_ac": 1_012_173_952 + 305_220_992}[model]
    )


@pytest.mark.parametrize("kind", ["random", "checkpoint"])
def test_random_weights_keep_actions_alive(kind: str, tmp_path: Path) -> None:
    """Neither vanish nor explode, at sizes of any checkpoint: the written one is read as a worker reads it."""
    place, sizes = Place(device=torch.device("cpu"), dtype=torch.float32, max_tokens=256, requests=2), SMALL
    if kind == "random":
        modules = random_modules(sizes, place)
    else:
        sizes, modules = checkpoint_modules(write_checkpoint(tmp_path / "pi05", "cpu", sizes), place)
    (actions,) = Acting(sizes, modules, place).act(observation(sizes, 3, 8))
    assert actions.isfinite().all() and 0.1 < float(actions.std()) < 10


def test_floors_are_those_of_the_design() -> None:
    """Milliseconds on one H100 at 780 TFLOP/s and 3.0 TB/s, computed another way in the design notes."""
    actual = floors(Sizes(), 3, 200, 10, H100)
    assert actual["prefix_s"] * 1e3 == pytest.approx(5.1, rel=0.12)  # all but the last block
    assert actual["vision_s"] * 1e3 == pytest.approx(0.8, rel=0.08)
    assert actual["flow_s"] * 1e3 == pytest.approx(2.1, rel=0.08)
    for name, expected in (("vitl", 14.9), ("vitg", 40.6)):
        seconds = encode_operations(ENCODERS[name], 1, 64) / H100["product_per_s"]
        assert seconds * 1e3 == pytest.approx(expected, rel=0.08)
    rollout = sum(step_seconds(RELEASED_AC, 1, 7 + step, H100) for step in range(30))
    assert rollout * 1e3 == pytest.approx(12.0, rel=0.15)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("fmha_cutlassF_bf16_aligned_64x64", "attention"),
        ("nvjet_tst_128x256", "products"),
        ("vectorized_layer_norm_kernel", "norms"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("vectorized_elementwise_kernel", "elementwise"),
        ("ampere_bf16_s16816gemm", "products"),
        ("_qkv_rotary_kernel", "products"),
        ("_split_k_kernel", "products"),
        ("_gate_up_gelu_kernel", "products"),
        ("_split_kv_kernel", "attention"),
        ("multicast_gemm_kernel", "products"),
    ],
)
def test_kernels_are_counted_in_families(kernel: str, expected: str) -> None:
    assert family(kernel) == expected


def test_a_request_that_fails_brings_the_end_of_every_log(tmp_path: Path) -> None:
    folder = tmp_path / ".state" / "bench"
    folder.mkdir(parents=True)
    (folder / "worker-0.log").write_text("x" * 9000 + "\nOutOfMemoryError: CUDA out of memory")
    running = Served(Plan(model="vjepa2_ac:tiny", device="cpu", port=1, root=tmp_path))
    with pytest.raises(RuntimeError, match="the server answered 500") as caught, running.telling():
        raise RuntimeError("the server answered 500")
    assert "--- worker-0.log" in str(caught.value) and str(caught.value).endswith("CUDA out of memory")
    assert len(str(caught.value)) < 9000
