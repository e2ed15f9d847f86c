"""The cluster of `up --ray`: its hosts, those that can run the deployment, and the devices that the operator names."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from mstar_core.cluster.facts import ClusterView, HostFacts
from mstar_core.cluster.survey import survey
from mstar_core.config.hosts import HostDevice, host_device
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.errors import ConfigError, MstarError, StartError, UsageError
from mstar_core.host.hardware.gpus import gpus, visible_gpus
from mstarctl.start.hardware.choice import auto_count
from mstarctl.start.hardware.devices import has_no_cuda
from mstarctl.start.hosts.offer import Offer
from mstarctl.start.hosts.versions import obstacle, unusable
from mstarctl.start.options import UpOptions, absolute
from mstarctl.start.replaced import several_hosts

RAY: Final = "ray"
"""Distribution of Ray."""

ONLY_HOSTS: Final = ("devices", "spread", "network", "ports")
"""Keys of `ray:` that mean nothing without an address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster as one deployment is planned on it. named: device of each rank as the operator names it, or empty."""

    config: ResolvedConfig
    options: UpOptions
    address: str
    offer: Offer
    named: tuple[HostDevice, ...]

    @property
    def local(self) -> HostFacts:
        """The host of the supervisor."""
        return self.offer.hosts[0]

    def host(self, name: str) -> HostFacts:
        """Return the host of a rank. name: as in `RankPlan`, empty for the supervisor's."""
        return next((host for host in self.offer.hosts if host.name == name and not host.is_local), self.local)

    def fault(self, title: str, detail: str = "", hint: str = "") -> MstarError:
        """Return an error at the place that names the devices: `--gpus`, or the key of the file."""
        if self.options.gpus is not None:
            return ConfigError(title, detail, hint, key="gpus")
        return self.config.error("ray.devices" if self.named else "ray.address", title, detail, hint)


def find_cluster(
    config: ResolvedConfig, options: UpOptions, packages: Mapping[str, str], torch_version: str | None
) -> Cluster | None:
    """Return the cluster of a configuration, None if all ranks run on this host.

    packages: version of mstarctl and of the model's distribution by name. Raises ConfigError for keys without an
    address, UsageError for options that exclude each other, and StartError for a cluster that cannot be used.
    """
    address = config.ray.address
    if address is None:
        _check_alone(config)
        return None
    if options.replace is not None:
        raise several_hosts(f"ray.address is {address} ({config.source('ray.address')})")
    named = named_devices(config, options)
    folder = absolute(config.weights)
    view = survey(address, (*packages, RAY), () if folder is None else (folder,))
    hosts = _with_local_first(view, is_cpu_only=has_no_cuda(torch_version))
    needed = {**packages, "python": platform.python_version(), RAY: view.version}
    refused = {host.name: why for host in hosts if (why := obstacle(host, needed))}
    for host in (hosts[0], *(known for device in named if (known := view.host(device.host)) is not None)):
        if host.name in refused:
            raise unusable(host, refused[host.name], needed)
    offer = Offer(hosts=tuple(host for host in hosts if host.name not in refused), refused=refused)
    return Cluster(config=config, options=options, address=view.address, offer=offer, named=named)


def _check_alone(config: ResolvedConfig) -> None:
    for word in ONLY_HOSTS:
        key = f"ray.{word}"
        if config.source(key) != "default":
            raise config.error(
                key, f"{key} is for several hosts, and ray.address is not set", hint="name the cluster: --ray auto"
            )


def _with_local_first(view: ClusterView, *, is_cpu_only: bool) -> list[HostFacts]:
    """Return the hosts with this one first, whose GPUs are numbered as CUDA_VISIBLE_DEVICES lists them.

    is_cpu_only: torch of this host cannot use its GPUs.
    """
    local = next((host for host in view.hosts if host.is_local), None)
    if local is None:
        raise StartError(
            "this host is not in the Ray cluster",
            f"{view.address} has {', '.join(host.name for host in view.hosts) or 'no host'}",
            f"ray start --address={view.address} adds it; or run mstarctl on one of them",
            phase="plan",
            code="no_cluster",
        )
    if is_cpu_only:
        local = msgspec.structs.replace(local, gpus=())
    elif "CUDA_VISIBLE_DEVICES" in os.environ:
        by_key = {gpu.key: gpu for gpu in local.gpus}
        listed = [(index, by_key[gpu.uuid]) for index, gpu in enumerate(visible_gpus(gpus())) if gpu.uuid in by_key]
        visible = tuple(msgspec.structs.replace(gpu, index=index) for index, gpu in listed)
        local = msgspec.structs.replace(local, gpus=visible)
    return [local, *(host for host in view.hosts if not host.is_local)]


def named_devices(config: ResolvedConfig, options: UpOptions) -> tuple[HostDevice, ...]:
    """Return the devices that `--gpus`, else `ray.devices`, names. Raises UsageError for an option that names none."""
    text = options.gpus
    if text is None:
        return tuple(device for entry in config.ray.devices if (device := host_device(entry)) is not None)
    if text == "auto" or auto_count(text) is not None:
        return ()
    return _read_gpus([part.strip() for part in text.split(",")])


def _read_gpus(parts: Sequence[str]) -> tuple[HostDevice, ...]:
    devices = []
    for part in parts:
        device = host_device(part)
        if device is None or part.isdecimal():
            raise UsageError(
                f"--gpus contains {part!r}",
                "with --ray it names the host of each GPU",
                "write HOST:INDEX, HOST or HOST:cpu for each rank, or auto:2",
            )
        devices.append(device)
    return tuple(devices)
