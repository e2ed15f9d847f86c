"""Environment of children: cache of compiled kernels, and compute threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.config.deployment import DeploymentSpec, Plan, RankPlan
from mstar_core.host import cache_dir
from mstar_core.host.cache_dir import TRITON_CACHE
from mstar_core.process.spawn import child_environment


def spec(device: str, cache: Path) -> DeploymentSpec:
    plan = Plan(ranks=(RankPlan(rank=0, device=device, nodes=("LLM",)),), placements=())
    return DeploymentSpec(name="d", model="m", plugin="p", run_dir="/r", log_dir="/l", plan=plan, cache_dir=str(cache))


def test_compiled_kernels_are_cached_by_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRITON_CACHE, raising=False)
    folder = Path(child_environment(spec("cuda:0", tmp_path))[TRITON_CACHE])
    assert folder.parent == tmp_path / "kernels" and "torch-" in folder.name and "triton-" in folder.name
    assert TRITON_CACHE not in child_environment(spec("cpu", tmp_path))


def test_a_folder_set_by_the_user_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRITON_CACHE, "/mine")
    assert child_environment(spec("cuda:0", tmp_path))[TRITON_CACHE] == "/mine"


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_every_process_computes_with_one_thread(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    made = child_environment(spec(device, tmp_path))
    assert made["OMP_NUM_THREADS"] == made["MKL_NUM_THREADS"] == "1"


def test_children_keep_bytecode_in_the_cache_where_python_keeps_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cache_dir.BYTECODE, raising=False)
    monkeypatch.setenv(cache_dir.UNWRITTEN, "1")
    monkeypatch.setattr(cache_dir, "cache_from_source", lambda source: str(tmp_path / "missing"))
    made = child_environment(spec("cpu", tmp_path))
    assert (made[cache_dir.BYTECODE], made[cache_dir.UNWRITTEN]) == (str(tmp_path / "bytecode"), "")
