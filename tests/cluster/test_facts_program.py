"""Facts that a host reports to a survey."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from mstar_core.cluster.facts_program import HostQuery, facts, host_gpus
from mstar_core.host.gpu_locks import FOLDER_VARIABLE, acquire_gpus, release
from mstar_core.host.hardware.gpus import Gpu

GPUS = [Gpu(name=f"card {n}", driver="570", free=n, total=10, uuid=f"GPU-{n}") for n in range(3)]


def test_versions_folders_and_interfaces_are_reported(tmp_path: Path) -> None:
    query = HostQuery(distributions=("mstarctl", "no-such-thing"), folders=(str(tmp_path), str(tmp_path / "none")))
    found = facts(query)
    assert set(found["versions"]) - {"cuda"} == {"python", "mstarctl"}
    assert found["versions"]["python"] == platform.python_version()
    assert found["missing"] == [str(tmp_path / "none")]
    assert found["interfaces"]["lo"] == "127.0.0.1"
    assert 0 < found["memory_free"] <= found["memory_total"]


def test_only_gpus_that_ray_sees_are_offered() -> None:
    assert [gpu.is_offered for gpu in host_gpus(GPUS, None)] == [True, True, True]
    assert [gpu.is_offered for gpu in host_gpus(GPUS, "2,0")] == [True, False, True]
    assert [gpu.is_offered for gpu in host_gpus(GPUS, "GPU-1")] == [False, True, False]
    assert [gpu.is_offered for gpu in host_gpus(GPUS, "")] == [False, False, False]


def test_the_holder_of_a_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    held = acquire_gpus({"cuda:1": "GPU-1"}, "speech")
    try:
        holders = [gpu.holder for gpu in host_gpus(GPUS, None)]
    finally:
        release(held)
    assert holders[0] == holders[2] == ""
    assert holders[1].startswith(f"deployment 'speech' (pid {os.getpid()}")
