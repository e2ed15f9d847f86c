"""A worker's GPU is opened while PyTorch is imported, and nothing is opened for a rank on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mstar_core.config.deployment import DeploymentSpec, Plan, RankPlan
from mstar_core.worker.start.early_device import DRIVER, gpu_of, open_context, open_early

RANKS = (RankPlan(rank=0, device="cpu", nodes=("LLM",)), RankPlan(rank=3, device="cuda:1", nodes=("Talker",)))


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "spec.json"
    plan = Plan(ranks=RANKS, placements=())
    path.write_bytes(DeploymentSpec(name="d", model="m", plugin="p", run_dir="/r", log_dir="/l", plan=plan).encode())
    return str(path)


def test_the_gpu_is_that_of_the_rank(spec: str) -> None:
    arguments = ("--incarnation", "1", "--rank")
    assert gpu_of([spec, *arguments, "3"]) == 1
    assert gpu_of([spec, *arguments, "0"]) is None and open_early([spec, *arguments, "0"]) is None
    assert gpu_of([spec, *arguments, "7"]) is None, "the worker itself reports a rank that does not exist"
    assert gpu_of(["--help"]) is None


def test_the_driver_makes_the_primary_context_of_the_device() -> None:
    calls: list[str] = []

    def driver(name: str) -> SimpleNamespace:
        calls.append(name)

        def call(step: str, result: int = 0) -> object:
            return lambda *given: calls.append(step) or result

        return SimpleNamespace(
            cuInit=call("init"),
            cuDeviceGet=call("device", 101 if "none" in calls else 0),
            cuDevicePrimaryCtxRetain=call("context"),
        )

    assert open_context(1, driver) and calls == [DRIVER, "init", "device", "context"]
    calls[:] = ["none"]
    assert not open_context(9, driver) and calls[-1] == "device", "no context of a device that does not exist"


def test_a_host_without_a_driver_leaves_it_to_pytorch() -> None:
    def missing(name: str) -> object:
        raise OSError(name)

    assert not open_context(0, missing)


def test_the_thread_starts_before_pytorch_is_imported(fresh_python: Callable[[str], Any]) -> None:
    assert fresh_python("import mstar_core.worker.start.early_device").loaded(("torch", "numpy")) == set()
