"""Views of Ray clusters that do not exist, for the planner of `up`."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import msgspec

from mstar_core.cluster.facts import ClusterView, HostFacts, HostGpu

GIB = 1 << 30
RAY = "2.60.0"
MODEL_PACKAGES = ("mstarctl", "mstar-orpheus", "mstar-qwen3omni")


def host(name: str, gpus: int = 0, *, number: int = 1, gib: float = 79.1, **fields: Any) -> HostFacts:
    """Return a host with the packages of this one. number: of its address, 10.0.0.NUMBER."""
    cards = tuple(
        HostGpu(
            index=index,
            name="NVIDIA H100",
            key=f"GPU-{name}-{index}",
            total_bytes=int(gib * GIB),
            free_bytes=int(gib * GIB),
        )
        for index in range(gpus)
    )
    address = f"10.0.0.{number}"
    versions = {name: metadata.version(name) for name in MODEL_PACKAGES}
    facts = HostFacts(
        name=name,
        node=f"node-{name}",
        address=address,
        is_local=number == 1,
        gpus=cards,
        gpu_count=float(gpus),
        free_gpus=float(gpus),
        memory_free=8 * GIB,
        versions={**versions, "python": platform.python_version(), "ray": RAY},
        interfaces={"lo": "127.0.0.1", "eth0": address, "eth1": ""},
    )
    return msgspec.structs.replace(facts, **fields)


class FakeSurvey:
    """Stands for `mstar_core.cluster.survey.survey`, and records its arguments."""

    def __init__(self, *hosts: HostFacts) -> None:
        self.view = ClusterView(address="10.0.0.1:6379", version=RAY, hosts=hosts)
        self.calls: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []

    def __call__(self, address: str, distributions: Sequence[str], paths: Sequence[str] = ()) -> ClusterView:
        self.calls.append((address, tuple(distributions), tuple(paths)))
        return self.view
