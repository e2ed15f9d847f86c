"""Shares of devices during sleep and wake: given back as the ranks free them, and taken again in full or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import StartError
from mstar_core.host.gpu_locks import FOLDER_VARIABLE, MemoryClaim, acquire_gpus, gpu_holders, release
from mstar_core.supervisor.operations.device_shares import DeviceShares

GIB = 1 << 30
MakeSpec = Callable[..., DeploymentSpec]


def held(key: str) -> list[int]:
    return [(holder.held_bytes or 0) // GIB for holder in gpu_holders(key)]


@pytest.fixture
def shares(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_spec: MakeSpec
) -> Iterator[Callable[..., DeviceShares]]:
    """Make the shares of a deployment with budgets in GiB by device, on devices of 80 GiB."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    taken: list[dict[str, int]] = []

    def make(**budgets: int) -> DeviceShares:
        gpus = {device.replace("_", ":"): device for device in budgets}
        claims = {
            key: MemoryClaim(device=device, need_bytes=budgets[key] * GIB, total_bytes=80 * GIB)
            for device, key in gpus.items()
        }
        taken.append(acquire_gpus(gpus, "sleeper", claims))
        return DeviceShares(make_spec("sleeper", gpus=gpus, claims=claims), taken[-1])

    yield make
    for each in taken:
        release(each)


def test_a_gpu_keeps_what_the_ranks_have_not_freed(shares: Callable[..., DeviceShares]) -> None:
    mine = shares(cuda_0=60, cuda_1=30)
    mine.give_back({"cuda:0": 50 * GIB}, is_whole=False)
    assert (held("cuda_0"), held("cuda_1")) == ([10], [30])
    mine.give_back({"cuda:1": 28 * GIB}, is_whole=True)
    assert held("cuda_1") == [2]
    mine.take_again({"cuda:0": 20 * GIB}, is_whole=False)
    assert (held("cuda_0"), held("cuda_1")) == ([30], [2])
    mine.take_again({"cuda:0": 30 * GIB, "cuda:1": 28 * GIB}, is_whole=True)
    assert (held("cuda_0"), held("cuda_1")) == ([60], [30])


def test_a_wake_is_refused_in_whole_where_one_device_is_taken(shares: Callable[..., DeviceShares]) -> None:
    mine = shares(cuda_0=60, cuda_1=60)
    mine.give_back({"cuda:0": 59 * GIB, "cuda:1": 59 * GIB}, is_whole=True)
    claim = MemoryClaim(device="cuda:1", need_bytes=50 * GIB, total_bytes=80 * GIB)
    other = acquire_gpus({"cuda:1": "cuda_1"}, "other", {"cuda_1": claim})
    with pytest.raises(StartError, match="GPU 1 has too little memory left for sleeper") as refused:
        mine.take_again({"cuda:0": 59 * GIB, "cuda:1": 59 * GIB}, is_whole=True)
    assert "'other'" in refused.value.detail and held("cuda_0") == [1]
    release(other)


def test_faked_memory_is_free_while_the_whole_deployment_sleeps(shares: Callable[..., DeviceShares]) -> None:
    mine = shares(cpu_0=2)
    mine.give_back({"cpu": 5}, is_whole=False)
    assert held("cpu_0") == [2]
    mine.give_back({"cpu": 5}, is_whole=True)
    assert held("cpu_0") == [0]
    mine.take_again({"cpu": 5}, is_whole=True)
    assert held("cpu_0") == [2]


def test_a_deployment_without_a_budget_keeps_its_gpus(make_spec: MakeSpec) -> None:
    alone = DeviceShares(make_spec("alone"), {})
    alone.give_back({"cuda:0": GIB}, is_whole=True)
    alone.take_again({"cuda:0": GIB}, is_whole=True)
