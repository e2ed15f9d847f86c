"""Errors of `up` for GPUs that are taken, full or missing, from the output of a fake nvidia-smi."""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import ExitCode
from mstar_core.host.gpu_locks import FOLDER_VARIABLE, acquire_gpus, release
from mstar_core.host.hardware.gpus import Gpu, gpu_keys, parse_processes, parse_smi, visible_gpus
from mstarctl.start.hardware.capacity import free_bytes, weights_bytes
from tests.cli.life.conftest import own_port

Cli = Callable[..., Any]
GIB = 1 << 30
ANSWERS = """#!/bin/sh
case "$*" in
  *--query-gpu*) printf 'NVIDIA H100, 580.1, 47309, 81000, GPU-aaaa\\nNVIDIA H100, 580.1, 80000, 81000, GPU-bbbb\\n' ;;
  *--query-compute-apps*) printf 'GPU-aaaa, %s, 28057\\n' "$SMI_PID" ;;
  -L) printf 'GPU 0: NVIDIA H100 (UUID: GPU-aaaa)\\nGPU 1: NVIDIA H100 (UUID: GPU-bbbb)\\n' ;;
esac
"""


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tool: Cli) -> Path:
    """A host whose nvidia-smi lists two GPUs, the first one partly used; torch is built for them."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(ANSWERS)
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SMI_PID", str(os.getpid()))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setattr("mstarctl.start.plan.torch_version", lambda: "2.11.0+cu130")
    return tmp_path


def checkpoint(folder: Path, gib: float) -> Path:
    """Create a directory with one safetensors file whose header declares `gib` of bfloat16 weights, without data."""
    header = {"w": {"dtype": "F32", "shape": [round(gib * GIB / 2)], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return folder


def test_a_gpu_of_another_deployment_is_refused_with_its_holder(tool: Cli, two_gpus: Path) -> None:
    held = acquire_gpus({"cuda:1": "GPU-bbbb"}, "bagel")
    said = tool("up", "orpheus:tiny", "--gpus", "1", "--dry-run", *own_port())
    assert said.code == ExitCode.START_FAILED
    assert "GPU 1 is in use" in said.err and f"deployment 'bagel' (pid {os.getpid()}" in said.err
    assert "mstarctl down bagel" in said.err
    assert tool("up", "orpheus:tiny", "--gpus", "0", "--dry-run", *own_port()).code == 0
    release(held)
    assert tool("up", "orpheus:tiny", "--gpus", "1", "--dry-run", *own_port()).code == 0


def test_weights_that_cannot_fit_name_who_holds_the_memory(tool: Cli, two_gpus: Path) -> None:
    folder = checkpoint(two_gpus / "weights", 58.9)
    said = tool("up", "orpheus", "--weights", str(folder), "--gpus", "0", "--dry-run", *own_port())
    assert said.code == ExitCode.START_FAILED, said.err
    assert "orpheus does not fit on 1 GPU" in said.err
    assert "weights need 58.9 GiB; 46.2 GiB of 79.1 GiB are free" in said.err
    assert f"27.4 GiB are used by pid {os.getpid()} (" in said.err and "--gpus 1" in said.err
    assert tool("up", "orpheus", "--weights", str(folder), "--gpus", "1", "--dry-run", *own_port()).code == 0


def test_a_start_that_fits_does_not_wait_for_the_processes_of_the_gpus(tool: Cli, two_gpus: Path) -> None:
    """nvidia-smi takes a second to list them, and only the error names them."""
    smi = two_gpus / "bin" / "nvidia-smi"
    smi.write_text(ANSWERS.replace("#!/bin/sh\n", f'#!/bin/sh\necho "$*" >> {two_gpus / "asked"}\n'))
    assert tool("up", "orpheus:tiny", "--gpus", "1", "--dry-run", *own_port()).code == 0
    asked = (two_gpus / "asked").read_text()
    assert "--query-gpu" in asked and "--query-compute-apps" not in asked


def test_gpus_out_of_range_are_counted(tool: Cli, two_gpus: Path) -> None:
    said = tool("up", "orpheus:tiny", "--gpus", "5", "--dry-run", *own_port())
    assert (said.code, "GPU 5 does not exist" in said.err, "0 to 1" in said.err) == (ExitCode.INVALID, True, True)


@pytest.mark.parametrize(
    ("visible", "keys"),
    [
        (None, ["GPU-aaaa", "GPU-bbbb"]),
        ("1,0", ["GPU-bbbb", "GPU-aaaa"]),
        ("GPU-bb", ["GPU-bbbb"]),
        ("MIG-12,0", ["MIG-12", "GPU-aaaa"]),
        ("0,-1,1", ["GPU-aaaa"]),
        ("", []),
    ],
)
def test_locks_follow_the_visible_devices(
    visible: str | None, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = [Gpu(name="H100", driver="", free=0, total=0, uuid=uuid) for uuid in ("GPU-aaaa", "GPU-bbbb")]
    assert [gpu.uuid for gpu in visible_gpus(gpus)] == keys
    devices = [f"cuda:{index}" for index in range(len(keys))]
    assert list(gpu_keys([*devices, "cpu"], gpus).values()) == keys


def test_without_a_uuid_the_number_names_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_keys(["cuda:3"], []) == {"cuda:3": "nvidia3"}


def test_weights_are_counted_in_half_precision(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "weights", 1)
    assert weights_bytes(folder) == GIB
    (folder / "broken.safetensors").write_bytes(b"\xff" * 20)
    assert weights_bytes(folder) == GIB
    assert weights_bytes(None) == weights_bytes(tmp_path / "nowhere") == 0


def test_the_driver_s_answers_are_read() -> None:
    assert parse_smi("NVIDIA H100, 580.1, 10, 20\n")[0].uuid == ""
    assert [p.pid for p in parse_processes("GPU-a, 12, 300\nGPU-a, 13, [N/A]\n\n")] == [12]


def test_what_is_free_is_that_of_the_plans_gpus_or_of_the_host(tmp_path: Path) -> None:
    cards = [Gpu(name="H100", driver="", free=free, total=80 * GIB, uuid=uuid) for uuid, free in (("a", 7), ("b", 9))]
    assert free_bytes({"cuda:0": "b", "cuda:1": "b"}, cards) == 9
    assert free_bytes({"cuda:0": "a", "cuda:1": "b"}, cards) == 16
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal: 100 kB\nMemAvailable: 64 kB\n")
    assert free_bytes({}, (), memory) == 64 * 1024
    assert free_bytes({}, (), tmp_path / "none") == 0


def test_the_chosen_number_of_requests_is_shown_and_can_be_set(tool: Cli, two_gpus: Path) -> None:
    def planned(*words: str) -> object:
        said = tool("up", "orpheus:tiny", *words, "--dry-run", "-o", "json", *own_port())
        assert said.code == 0, said.err
        return json.loads(said.out)["items"][0]["max_concurrent_requests"]

    assert planned("--gpus", "1") == 64
    assert planned("--gpus", "1", "--set", "max_concurrent_requests=9") == 9
    assert planned("--device", "cpu") == 32


def test_auto_chooses_the_file_for_the_gpus_and_a_named_file_is_kept(tool: Cli, two_gpus: Path) -> None:
    def planned(*words: str) -> str:
        said = tool("up", *words, "--dry-run", *own_port())
        assert said.code == 0, said.err
        return str(said.out + said.err)

    both = planned("orpheus:tiny", "--gpus", "auto:2")
    assert (
        "orpheus_replicas.yaml" in both and "auto:2 chose orpheus_replicas: uses 2 of 2 GPUs; copies of nodes" in both
    )
    assert "orpheus_colocated.yaml" in planned("orpheus:tiny", "--gpus", "auto:1")
    for words in (("orpheus_disaggregated:tiny",), ("orpheus:tiny", "--config", "orpheus_disaggregated")):
        assert "chose" not in planned(*words, "--gpus", "auto:2")
    assert "chose" not in planned("orpheus:tiny", "--gpus", "0,1")


def test_fit_keeps_the_default_file_unless_the_gpus_cannot_hold_it(tool: Cli, two_gpus: Path) -> None:
    def planned(*words: str) -> str:
        said = tool("up", "qwen3_omni:tiny", *words, "--dry-run", *own_port())
        assert said.code == 0, said.err
        return str(said.out + said.err)

    alone = planned("--gpus", "1", "--fit")
    assert "qwen3omni_single_gpu.yaml" in alone
    assert "qwen3omni_2gpu needs 2 GPUs; qwen3omni_single_gpu fits: uses 1 of 1 GPU" in alone
    assert "rank 0  cuda:1" in alone, "the chosen file runs on the GPU of the options"
    for words in (("--gpus", "0,1"), ("--device", "cpu"), ()):
        assert "qwen3omni_2gpu.yaml" in planned(*words, "--fit")
    said = tool("up", "qwen3_omni:tiny", "--gpus", "1", "--dry-run", *own_port())
    assert said.code == ExitCode.INVALID and "--fit" in said.err
    words = ("--config", "qwen3omni_2gpu", "--gpus", "1", "--fit")
    named = tool("up", "qwen3_omni:tiny", *words, "--dry-run", *own_port())
    assert named.code == ExitCode.INVALID, "a named file is kept"


def test_a_gateway_checks_each_model_against_the_gpus_before_it_starts(tool: Cli, two_gpus: Path) -> None:
    file = two_gpus / "serve.yaml"
    file.write_text('models:\n  omni: {target: "qwen3_omni:tiny", gpus: "1"}\n  voice: {target: "orpheus:tiny"}\n')
    said = tool("serve", str(file), "--dry-run")
    assert said.code == 0, said.err
    assert "omni: qwen3omni_single_gpu.yaml (2 visible; qwen3omni_2gpu needs 2 GPUs" in said.err
    assert "voice: " not in said.err, "its own file fits"
    file.write_text(
        "models:\n  omni: {target: qwen3_omni, gpus: '1', memory: 70GiB}\n  own: {target: qwen3omni_2gpu, gpus: '1'}\n"
        "  gone: {target: nothing}\n"
    )
    said = tool("serve", str(file), "-d")
    assert said.code == ExitCode.INVALID, said.err
    assert "serve.yaml has 3 faults" in said.err
    for line in (
        "serve.yaml:2: omni cannot start: no deployment file of qwen3_omni fits 1 GPU of 85 GB; ",
        "qwen3omni_single_gpu: rank 0 needs a GPU of 96 GB, and its GPU has 85",
        "serve.yaml:3: own cannot start: no device backs rank 1",
        "serve.yaml:4: gone cannot start: ",
    ):
        assert line in said.err, said.err


def test_a_model_that_may_start_later_is_a_warning(tool: Cli, two_gpus: Path) -> None:
    file = two_gpus / "serve.yaml"
    file.write_text("models:\n  voice: {target: orpheus, weights: not_there}\n")
    said = tool("serve", str(file), "--dry-run")
    assert said.code == 0 and "voice cannot start now: " in said.err and "not_there" in said.err
