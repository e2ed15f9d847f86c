"""Memory that workers of several hosts read: CUDA IPC ends at the host, the transfer engine listens on its address."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mstar_core.config.deployment import DeploymentSpec, HostPlan, NodePlacement, Plan, RankPlan
from mstar_core.config.resolved import TransportConfig
from mstar_core.worker import main
from mstar_core.worker.peer_memory import mooncake

ADDRESS = "127.0.0.2"
OTHERS = ("worker-1", "worker-2", "worker-3")
HOSTS = ("", "", "b", "b")
"""Host of each rank."""


class NoEngine:
    """A transfer engine that notes how it was opened."""

    opened: list[tuple[str, ...]]

    def initialize(self, *words: str) -> int:
        NoEngine.opened = [words]
        return 0

    def get_rpc_port(self) -> int:
        return 4321


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(mooncake, "transfer_engine", lambda: SimpleNamespace(TransferEngine=NoEngine))


def spec_of(protocol: str, hosts: tuple[str, ...] = HOSTS, device: str | None = None) -> DeploymentSpec:
    placed = (HostPlan(name="", address=ADDRESS), HostPlan(name="b", address="127.0.0.3"))
    return DeploymentSpec(
        name="d",
        model="orpheus",
        plugin="mstar-orpheus",
        run_dir="/nowhere",
        log_dir="/nowhere",
        transport=TransportConfig(protocol=protocol, device=device),
        plan=Plan(
            ranks=tuple(
                RankPlan(rank=rank, device=f"cuda:{rank % 2}", nodes=("LLM",), host=host)
                for rank, host in enumerate(hosts)
            ),
            placements=(NodePlacement(node="LLM", replicas=tuple((rank,) for rank in range(len(hosts)))),),
        ),
        hosts=placed if any(hosts) else (),
    )


def peers(spec: DeploymentSpec, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the workers to which rank 0 sends tensors by peer memory."""
    memory = SimpleNamespace(holds=lambda tensor: True)
    for name in ("CudaMemory", "MooncakeMemory"):
        monkeypatch.setattr(main, name, lambda *words: memory)
    monkeypatch.setattr(main, "resolve_device", torch.device)
    life: Any = SimpleNamespace(name="worker-0", incarnation=1)
    found = main.peer_memory_of(spec, spec.plan.ranks[0], life)
    large = torch.empty(1 << 20)
    return set() if found is None else {name for name in OTHERS if found.suits(large, name)}


@pytest.mark.parametrize(
    ("protocol", "hosts", "expected"),
    [
        ("SHM", HOSTS, {"worker-1"}),
        ("SHM", ("", "b"), set()),
        ("SHM", ("", ""), {"worker-1"}),
        ("TCP", HOSTS, set(OTHERS)),
    ],
)
def test_cuda_ipc_ends_at_the_host_and_the_network_does_not(
    protocol: str, hosts: tuple[str, ...], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert peers(spec_of(protocol, hosts), monkeypatch) == expected


@pytest.mark.parametrize(
    ("protocol", "device", "hosts", "address"),
    [
        ("TCP", None, HOSTS, ADDRESS),
        ("TCP", "lo", HOSTS, "127.0.0.1"),
        ("RDMA", "mlx5_0", HOSTS, ADDRESS),
        ("TCP", None, ("", ""), "127.0.0.1"),
    ],
)
def test_the_engine_listens_on_the_address_of_its_host(
    protocol: str, device: str | None, hosts: tuple[str, ...], address: str
) -> None:
    spec = spec_of(protocol, hosts, device)
    engine, session = mooncake.open_engine(spec.transport, 1, 1, spec.address)
    assert session == f"{address}:4321" and isinstance(engine, NoEngine)
    assert NoEngine.opened[0][0] == f"{address}:{8080 + 16 + 4}"
