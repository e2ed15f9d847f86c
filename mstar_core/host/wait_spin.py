"""How long the processes of a deployment look for messages without sleeping: as told, or as the machine allows.

Called by api, conductor and workers when they start.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from mstar_core.config.deployment import DeploymentSpec

AUTOMATIC_US: Final = 50_000
"""Where it is on by itself: longer than most requests for which a wake-up is a noticeable part of their time."""

CORES_EACH: Final = 4
"""Cores per process that spins from which on it is: the others are for clients, pools, drivers and the kernel."""

_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")


def wait_spin_s(spec: DeploymentSpec, cores: float | None = None) -> float:
    """Seconds. cores: that the process may use; None asks the machine.

    Unless told it is on only beside accelerators, whose price a few busy cores do not change, and with cores to spare.
    """
    if spec.wait_spin_us is not None:
        return spec.wait_spin_us / 1e6
    spinning = len(spec.plan.ranks) + 2  # workers, api, conductor
    has_accelerator = any(rank.device != "cpu" for rank in spec.plan.ranks)
    if not has_accelerator or (usable_cores() if cores is None else cores) < CORES_EACH * spinning:
        return 0.0
    return AUTOMATIC_US / 1e6


def usable_cores(limit: Path = _CPU_MAX) -> float:
    """Cores that this process may run on, or the share of them that its control group has of their time.

    limit: the group's file: microseconds, or `max`, of so many. A container's is the root that it sees.
    """
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = limit.read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return cores
