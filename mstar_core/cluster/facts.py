"""Facts of the hosts of a Ray cluster, as a deployment is planned on them. Read by `up`, `hosts` and `doctor`."""

from __future__ import annotations

import ipaddress
from typing import Final

import msgspec

from mstar_core.observe.frames import LOCAL

NAME_FAULT: Final = f"its name is {LOCAL!r}, which means the host of the supervisor"
"""Fault of another host that has the reserved name."""


class HostGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of a host. index: of NVML there. key: of its lock (host/gpu_locks.py). Bytes; free at the survey.

    is_offered: Ray may give it to this deployment. holder: deployment that has locked it, as `'NAME' (pid 7)`.
    """

    index: int
    name: str
    key: str
    total_bytes: int
    free_bytes: int
    is_offered: bool = True
    holder: str = ""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A host of the cluster, as a task on it has seen it.

    name: unique in the cluster: its host name, with a number if several nodes share it. node: Ray's id. address: at
    which Ray reaches it. is_local: the host of the caller. cpus, gpu_count: offered by Ray; free_cpus, free_gpus: not
    reserved. Which GPUs are free, only a reservation tells. versions: of mstarctl, plugins, ray and python by
    distribution name, `cuda` of the driver. interfaces: IPv4 address by name, "" for one without; adapters: of RDMA.
    missing: folders of the survey that cannot be read there. fault: why the host cannot be used, such as a missing
    mstarctl; empty if it can.
    """

    name: str
    node: str
    address: str
    is_local: bool = False
    cpus: float = 0.0
    free_cpus: float = 0.0
    memory_total: int = 0
    memory_free: int = 0
    gpus: tuple[HostGpu, ...] = ()
    gpu_count: float = 0.0
    free_gpus: float = 0.0
    versions: dict[str, str] = {}
    interfaces: dict[str, str] = {}
    adapters: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    fault: str = ""

    def __post_init__(self) -> None:
        if self.name == LOCAL and not self.is_local and not self.fault:
            msgspec.structs.force_setattr(self, "fault", NAME_FAULT)

    def address_in(self, network: str | None) -> str:
        """Return the address for other hosts. network: an interface, or a network such as `10.0.0.0/24`; None: Ray's.

        Returns "" if this host has no address there.
        """
        if not network:
            return self.address
        if network in self.interfaces:
            return self.interfaces[network]
        try:
            within = ipaddress.ip_network(network, strict=False)
        except ValueError:
            return ""
        addresses = (address for address in self.interfaces.values() if address)
        return next((address for address in addresses if ipaddress.ip_address(address) in within), "")


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """A Ray cluster. address: of its head, as `HOST:PORT`. version: of Ray. hosts: living ones, the local one first."""

    address: str
    version: str
    hosts: tuple[HostFacts, ...]

    def host(self, name: str) -> HostFacts | None:
        """Return the host of a name or an address, None if there is none."""
        return next((host for host in self.hosts if name in (host.name, host.address)), None)
