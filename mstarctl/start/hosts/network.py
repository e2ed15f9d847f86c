"""Addresses at which the hosts of a deployment reach each other, by `ray.network`. Used by the planner of `up`."""

from __future__ import annotations

import ipaddress

from mstar_core.cluster.facts import HostFacts
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.errors import did_you_mean


def address_of(host: HostFacts, config: ResolvedConfig) -> str:
    """Return the address of a host in `ray.network`, else the one that Ray uses. Raises ConfigError if it has none."""
    network = config.ray.network
    if network is None:
        return host.address
    if "/" not in network:
        address = host.interfaces.get(network, "")
        title = f"host {host.name} has no interface {network!r} with an IPv4 address"
    else:
        inside = ipaddress.ip_network(network, strict=False)
        listed = (text for text in host.interfaces.values() if text and ipaddress.ip_address(text) in inside)
        address = next(listed, "")
        title = f"host {host.name} has no address in {network}"
    if address:
        return address
    known = ", ".join(f"{name} {text}".strip() for name, text in host.interfaces.items()) or "no known interface"
    with_address = [name for name, text in host.interfaces.items() if text and not _is_loopback(text)]
    by_name = did_you_mean(network, with_address) if "/" not in network and with_address else ""
    hint = by_name or "name a network that all hosts of the deployment share, such as 10.0.0.0/24"
    raise config.error("ray.network", title, f"it has {known}", hint)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
