"""Checks of the transport between ranks before anything starts. Called by the planner of `up`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mstar_core.config.deployment import Plan
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.config.schema import words_of
from mstar_core.errors import TransportError, UsageError, did_you_mean
from mstar_core.host.network import LOOPBACK, check_adapters, own_address, transfer_engine, window
from mstar_core.host.ports import bind_error

KEYS: Final = ("transport.port", "transport.device")
"""Keys that only TCP and RDMA use."""


def check_protocol(protocol: str, flag: str) -> str:
    """Return the protocol of an option in capitals. Raises UsageError if it is unknown."""
    choices = words_of("transport")["protocol"].choices
    if protocol.upper() not in choices:
        raise UsageError(f"unknown tensor protocol {protocol!r}", hint=did_you_mean(protocol.upper(), choices))
    return protocol.upper()


def check_transport(config: ResolvedConfig, plan: Plan, address: str = LOOPBACK) -> None:
    """Raise ConfigError, with the line, for a transport that this host or its library does not support.

    address: at which the ranks reach each other by default.
    A file that sets a port or a device for SHM is refused; such an option has a warning (`unused_transport`).
    """
    transport = config.transport
    if transport.protocol == "SHM":
        for key in KEYS:
            source, protocol_source = config.source(key), config.source("transport.protocol")
            if source != "default" and not source.startswith("--") and not protocol_source.startswith("--"):
                raise config.error(
                    key,
                    f"{key} is for TCP and RDMA, and transport.protocol is SHM",
                    hint="remove it, or set transport.protocol to TCP",
                )
        return
    if len(plan.ranks) == 1:
        return
    _as_config_error(config, "transport.protocol", lambda: transfer_engine())
    if transport.protocol == "RDMA":
        _as_config_error(config, _device_key(config), lambda: check_adapters(transport.device))
    elif transport.device is not None:
        address = _as_config_error(config, _device_key(config), lambda: own_address(transport.device))
    _check_ports(config, plan, address)


def _as_config_error(config: ResolvedConfig, key: str, check: Callable[[], object]) -> str:
    try:
        return str(check())
    except TransportError as error:
        raise config.error(key, error.title, error.detail, error.hint) from error


def _device_key(config: ResolvedConfig) -> str:
    return "transport.protocol" if config.transport.device is None else "transport.device"


def _check_ports(config: ResolvedConfig, plan: Plan, address: str) -> None:
    """Check that each rank finds two free ports in its window, and that the api's port is outside of all."""
    first, last = config.transport.port, window(config.transport.port, len(plan.ranks)).start - 1
    if last > 65535:
        hint = f"at most {65536 - (last + 1 - first)}"
        raise config.error("transport.port", f"ports {first} to {last} are needed", "the last port is 65535", hint)
    if first <= config.api.port <= last:
        raise config.error(
            "transport.port",
            f"the api's port {config.api.port} is among the ports of the transport",
            f"{len(plan.ranks)} ranks use {first} to {last}",
            "choose another transport.port or api.port",
        )
    for rank in (each for each in plan.ranks if not each.host):
        ports = window(first, rank.rank)
        if sum(bind_error(address, port) is None for port in ports) < 2:
            raise config.error(
                "transport.port",
                f"rank {rank.rank} has no two free ports for {config.transport.protocol}",
                f"ports {ports.start} to {ports.stop - 1} on {address} are in use",
                "choose another transport.port",
            )


def unused_transport(config: ResolvedConfig, plan: Plan) -> list[str]:
    """Return a sentence for each setting of the transport that has no effect."""
    keys = [key for key in KEYS if config.source(key) != "default"]
    if config.transport.protocol == "SHM":
        why = "tensors move through shared memory (SHM), which uses no network"
    elif len(plan.ranks) == 1:
        why = "there is one rank, which sends no tensors to others"
        keys.append("transport.protocol")
    else:
        return []
    values = {"transport.protocol": config.transport.protocol, "transport.port": config.transport.port}
    values["transport.device"] = config.transport.device or ""
    return [f"{_named(config, key)} {values[key]} has no effect: {why}" for key in keys]


def _named(config: ResolvedConfig, key: str) -> str:
    source = config.source(key)
    return source if source.startswith("--") and " " not in source else key


def transport_cautions(config: ResolvedConfig, plan: Plan) -> tuple[str, ...]:
    """Return a warning if other hosts can read the tensors of the deployment."""
    if config.transport.protocol == "SHM" or len(plan.ranks) == 1:
        return ()
    first, last = config.transport.port, window(config.transport.port, len(plan.ranks)).start - 1
    return (
        f"{config.transport.protocol} transfers are neither encrypted nor authenticated:"
        f" ports {first} to {last} must be reachable by this deployment's hosts only",
    )
