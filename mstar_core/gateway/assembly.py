"""Choice of the gateway's parts by its configuration. Used by its main."""

from __future__ import annotations

from pathlib import Path

from mstar_core.gateway.fleet.running import RunningFleet
from mstar_core.gateway.parts import Fleet, Gate
from mstar_core.gateway.serve_file import ServeFile
from mstar_core.gateway.tenants.folder import gateway_folder
from mstar_core.gateway.tenants.gate import TenantGate


def make_fleet(serve: ServeFile, state_dir: Path) -> Fleet:
    """Return the fleet. state_dir: folder of the gateway that survives its restarts."""
    return RunningFleet(serve)


def make_gate(serve: ServeFile, state_dir: Path) -> Gate:
    """Return the gate. Tenants and usage lie in one folder for all gateways of a user, whatever the `state_dir`."""
    return TenantGate(serve, gateway_folder())
