"""Checks of the `ray:` section of a file, each with the place of its value. Called by `resolve`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from mstar_core.config.files.faults import Faults
from mstar_core.config.files.read import CheckedValue
from mstar_core.config.hosts import host_device, is_network, is_ray_address, port_range

CHECKS: Final[Mapping[str, tuple[Callable[[str], object], str]]] = {
    "ray.address": (is_ray_address, "HOST:PORT of the cluster's head, such as 10.0.0.1:6379, or auto"),
    "ray.network": (is_network, "an interface such as eth0, or a network such as 10.0.0.0/24"),
    "ray.ports": (port_range, "the first and the last port, such as 20000-20999"),
}
DEVICE: Final = "HOST:INDEX for a GPU, HOST for any GPU of it, or HOST:cpu"


def check_ray(values: Mapping[str, CheckedValue], faults: Faults) -> None:
    """Collect a fault for each value of the section that cannot be read."""
    for key, (reads, hint) in CHECKS.items():
        value = values.get(key)
        if value is not None and value.value is not None and not reads(value.value):
            with faults.collected():
                raise value.place.error(f"{key} is {value.value!r}", key, hint=hint)
    devices = values.get("ray.devices")
    for index, text in enumerate(devices.value or () if devices is not None else ()):
        if devices is not None and host_device(text) is None:
            key = f"ray.devices.{index}"
            with faults.collected():
                raise devices.place.value[index].error(f"{key} is {text!r}", key, hint=DEVICE)
