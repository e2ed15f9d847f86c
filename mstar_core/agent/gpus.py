"""Locks of the GPUs that the ranks of an agent's host use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import StartError
from mstar_core.host.gpu_locks import acquire_gpus, release
from mstar_core.host.readings.gpus import library

CUDA = "cuda:"


def gpu_keys() -> dict[str, str]:
    """Return `cuda:INDEX` -> UUID of the GPUs of this host, by NVML's indices; empty without NVML."""
    nvml = library()
    if nvml is None:
        return {}
    try:
        nvml.nvmlInit()
        try:
            handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())}
            uuids = {index: nvml.nvmlDeviceGetUUID(handle) for index, handle in handles.items()}
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return {}
    return {f"{CUDA}{index}": uuid.decode() if isinstance(uuid, bytes) else uuid for index, uuid in uuids.items()}


class GpuHolder:
    """The locks of this host. Owned by the agent. keys: returns the key of each GPU's lock by device."""

    def __init__(self, host: str, keys: Callable[[], Mapping[str, str]] = gpu_keys) -> None:
        self._host = host
        self._keys = keys
        self._held: dict[str, dict[str, int]] = {}  # by device

    def hold(self, spec: DeploymentSpec) -> None:
        """Lock the GPUs of the ranks of this host, and release those that none uses any more.

        Raises StartError that names the host, the GPU and its holder.
        """
        devices = {rank.device for rank in spec.plan.ranks if rank.host == self._host and rank.device.startswith(CUDA)}
        for device in self._held.keys() - devices:
            release(self._held.pop(device))
        new = sorted(devices - self._held.keys())
        keys = {**{device: device for device in new}, **self._keys()} if new else {}
        for device in new:
            try:
                self._held[device] = acquire_gpus({device: keys[device]}, spec.name)
            except StartError as error:
                title = f"{error.title} on host {self._host}"
                raise StartError(title, error.detail, error.hint, phase="plan", code=error.code) from error

    def release(self) -> None:
        """Release all locks."""
        for held in self._held.values():
            release(held)
        self._held.clear()
