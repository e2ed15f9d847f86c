"""Facts of this host, as JSON on standard output: `python -m mstar_core.cluster.facts_program`.

A survey runs it on each host of a cluster in the Python that agents are started with.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from typing import Any

import msgspec

from mstar_core.cluster.facts import HostGpu
from mstar_core.host.gpu_locks import gpu_holder
from mstar_core.host.hardware.gpus import Gpu, gpus, visible_gpus
from mstar_core.host.hardware.memory import memory_facts
from mstar_core.host.network import adapters, interfaces


class HostQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Questions of a survey. distributions: whose versions to report. folders: to be tried.

    visible: CUDA_VISIBLE_DEVICES of Ray on this host, None without.
    """

    distributions: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    visible: str | None = None


def main() -> None:
    """Read a HostQuery from standard input and print the facts that Ray does not know."""
    query = msgspec.json.decode(sys.stdin.buffer.read(), type=HostQuery)
    sys.stdout.buffer.write(msgspec.json.encode(facts(query)))


def facts(query: HostQuery) -> dict[str, Any]:
    """Return fields of HostFacts."""
    present = gpus()
    memory = memory_facts()
    return {
        "memory_total": memory.get("MemTotal", 0),
        "memory_free": memory.get("MemAvailable", 0),
        "gpus": host_gpus(present, query.visible),
        "versions": _versions(query.distributions, present),
        "interfaces": interfaces(),
        "adapters": adapters(),
        "missing": [folder for folder in query.folders if not _is_readable(folder)],
    }


def host_gpus(present: list[Gpu], visible: str | None) -> list[HostGpu]:
    """Return all GPUs of this host. visible: CUDA_VISIBLE_DEVICES of Ray, which offers no others."""
    offered = {id(gpu) for gpu in visible_gpus(present, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})}
    return [_host_gpu(index, gpu, id(gpu) in offered) for index, gpu in enumerate(present)]


def _host_gpu(index: int, gpu: Gpu, is_offered: bool) -> HostGpu:
    key = gpu.uuid or f"nvidia{index}"
    return HostGpu(
        index=index,
        name=gpu.name,
        key=key,
        total_bytes=gpu.total,
        free_bytes=gpu.free,
        is_offered=is_offered,
        holder=str(gpu_holder(key) or ""),
    )


def _versions(distributions: Iterable[str], present: list[Gpu]) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    if present and present[0].driver:
        versions["cuda"] = present[0].driver
    return versions


def _is_readable(folder: str) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)


if __name__ == "__main__":
    main()
