"""Busy-poll window of a deployment's processes, as configured or as the machine's cores allow.

Called by api, conductor and workers at start.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from mstar_core.config.deployment import DeploymentSpec

AUTOMATIC_US: Final = 50_000
"""Default window beside accelerators. It outlasts most requests that are so short that a wake-up shows."""

CORES_EACH: Final = 4
"""Cores per polling process that the default requires. The rest serve clients, pools, drivers and the kernel."""

_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")


def wait_spin_s(spec: DeploymentSpec, cores: float | None = None) -> float:
    """Return the busy-poll window in seconds. cores: usable cores; None reads them from the machine.

    Without a configured value, processes poll only beside accelerators and with enough cores.
    """
    if spec.wait_spin_us is not None:
        return spec.wait_spin_us / 1e6
    spinning = len(spec.plan.ranks) + 2  # workers, api, conductor
    has_accelerator = any(rank.device != "cpu" for rank in spec.plan.ranks)
    if not has_accelerator or (usable_cores() if cores is None else cores) < CORES_EACH * spinning:
        return 0.0
    return AUTOMATIC_US / 1e6


def usable_cores(limit: Path = _CPU_MAX) -> float:
    """Return the cores that this process may use, limited by the CPU quota of its control group.

    limit: the group's `cpu.max` file: quota (or `max`) and period in microseconds.
    """
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = limit.read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return cores
