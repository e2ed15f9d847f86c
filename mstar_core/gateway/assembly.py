"""Choice of the gateway's parts by its configuration. Used by its main."""

from __future__ import annotations

from pathlib import Path

from mstar_core.gateway.fleet.clock import MonotonicClock
from mstar_core.gateway.fleet.hosts.hosts import FleetHosts
from mstar_core.gateway.fleet.hosts.remote_host import remote_host
from mstar_core.gateway.fleet.local_host import LocalHost
from mstar_core.gateway.fleet.managed import ManagedFleet
from mstar_core.gateway.fleet.owned import owner_token
from mstar_core.gateway.fleet.plans import KeptPlans
from mstar_core.gateway.fleet.running import RunningFleet
from mstar_core.gateway.parts import Fleet, Gate
from mstar_core.gateway.serve_file import ServeFile
from mstar_core.gateway.tenants.accounts.folder import gateway_folder
from mstar_core.gateway.tenants.gate import TenantGate
from mstar_core.host.other_hosts.contexts import LOCAL


def make_fleet(serve: ServeFile, state_dir: Path) -> Fleet:
    """Return the fleet. state_dir: folder of the gateway that survives its restarts."""
    plans = KeptPlans(gateway_folder())
    hosts = FleetHosts(lambda name: LocalHost(plans=plans) if name == LOCAL else remote_host(name))
    return ManagedFleet(serve, hosts, MonotonicClock(), RunningFleet(serve), owner_token(state_dir))


def make_gate(serve: ServeFile, state_dir: Path) -> Gate:
    """Return the gate. Tenants and usage lie in one folder for all gateways of a user, whatever the `state_dir`."""
    return TenantGate(serve, gateway_folder())
