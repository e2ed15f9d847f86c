"""GPUs that the hosts of a cluster offer to a deployment, and those that `--gpus` or `ray.devices` name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from mstar_core.cluster.facts import HostFacts, HostGpu
from mstar_core.config.hosts import HostDevice
from mstar_core.errors import MstarError, did_you_mean
from mstarctl.output.units import counted

Fault = Callable[[str, str, str], MstarError]
"""Makes an error of title, detail and hint, at the place that names the devices."""

USE_OTHERS: Final = "use other GPUs; mstarctl hosts --ray ADDRESS lists them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A device of a host for one rank, or for several that name it. gpu: None for the CPU."""

    host: HostFacts
    gpu: HostGpu | None = None

    @property
    def device(self) -> str:
        """The device on its host."""
        return "cpu" if self.gpu is None else f"cuda:{self.gpu.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Hosts of a cluster that may run ranks, the local one first. refused: reason for each other host, by name."""

    hosts: tuple[HostFacts, ...]
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def gpu_count(self) -> int:
        """Number of free GPUs of all hosts."""
        return sum(len(free_gpus(host)) for host in self.hosts)

    @property
    def free(self) -> list[HostGpu]:
        """The free GPUs: of the local host, then of those with the most."""
        local = [host for host in self.hosts if host.is_local]
        others = sorted((h for h in self.hosts if not h.is_local), key=lambda host: -len(free_gpus(host)))
        return [gpu for host in (*local, *others) for gpu in free_gpus(host)]

    def text(self) -> str:
        """Return what each host offers, and why others offer nothing."""
        lines = [_offered(host) for host in self.hosts]
        return "\n".join([*lines, *(f"{name}: cannot be used: {why}" for name, why in self.refused.items())])


def free_gpus(host: HostFacts) -> list[HostGpu]:
    """Return GPUs of a host that no deployment uses, as many as Ray has free. Ray decides which of them it is."""
    return [gpu for gpu in host.gpus if gpu.is_offered and not gpu.holder][: int(host.free_gpus)]


def _offered(host: HostFacts) -> str:
    free = len(free_gpus(host))
    if free == len(host.gpus):
        return f"{host.name}: {counted(free, 'GPU') if free else 'no GPU'}"
    return f"{host.name}: {free} of {counted(len(host.gpus), 'GPU')} free"


def named_slots(devices: Sequence[HostDevice], offer: Offer, fault: Fault) -> list[Slot]:
    """Return the device of each entry; a host alone takes its first free GPU that no entry names.

    Raises the error of `fault` for a host or a GPU that does not exist or is in use.
    """
    hosts = [_named_host(device.host, offer, fault) for device in devices]
    taken = {(host.node, device.index) for host, device in zip(hosts, devices, strict=True) if device.index is not None}
    slots: list[Slot] = []
    for host, device in zip(hosts, devices, strict=True):
        if device.is_cpu:
            slots.append(Slot(host=host))
            continue
        gpu = _gpu(host, device.index, fault) if device.index is not None else _any(host, taken, fault)
        taken.add((host.node, gpu.index))
        slots.append(Slot(host=host, gpu=gpu))
    for host in hosts:
        if sum(node == host.node for node, _ in taken) > len(free_gpus(host)):
            raise _too_few(host, fault)
    return slots


def _named_host(name: str, offer: Offer, fault: Fault) -> HostFacts:
    for host in offer.hosts:
        if name in (host.name, host.address):
            return host
    names = [host.name for host in offer.hosts]
    raise fault(f"the cluster has no host {name!r}", f"it has {', '.join(names)}", did_you_mean(name, names))


def _gpu(host: HostFacts, index: int, fault: Fault) -> HostGpu:
    gpu = next((gpu for gpu in host.gpus if gpu.index == index), None)
    if gpu is None:
        raise fault(f"host {host.name} has no GPU {index}", f"it has {indices(g.index for g in host.gpus)}", USE_OTHERS)
    if gpu.holder:
        raise fault(f"GPU {index} of host {host.name} is in use", f"{gpu.holder} holds it", USE_OTHERS)
    if not gpu.is_offered:
        raise fault(f"Ray does not offer GPU {index} of host {host.name}", _offered(host), USE_OTHERS)
    return gpu


def _any(host: HostFacts, taken: set[tuple[str, int]], fault: Fault) -> HostGpu:
    free = free_gpus(host)
    gpu = next((gpu for gpu in free if (host.node, gpu.index) not in taken), None)
    if gpu is None:
        raise _too_few(host, fault)
    return gpu


def _too_few(host: HostFacts, fault: Fault) -> MstarError:
    return fault(f"host {host.name} has too few free GPUs", _offered(host), USE_OTHERS)


def indices(numbers: Iterable[int]) -> str:
    """Return the indices of GPUs as text."""
    listed = [str(number) for number in numbers]
    return f"GPU {', '.join(listed)}" if listed else "no GPU"
