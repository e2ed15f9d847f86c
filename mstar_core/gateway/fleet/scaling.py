"""Number of replicas by load: one more while requests queue, one fewer after a calm time, with a pause between."""

from __future__ import annotations

from typing import Final

from mstar_core.gateway.fleet.managed_model import ManagedModel

QUEUE_S: Final = 5.0
"""Time for which requests must have queued before a replica is added."""

CALM_S: Final = 120.0
"""Time with no queue and room for all requests on one replica fewer, before one is removed."""

COOLDOWN_S: Final = 30.0
"""Least time between two changes."""


def desired_replicas(model: ManagedModel, waiting: int, running: int, now: float) -> int:
    """Return the number of replicas that a model should have, and note since when it has queued or been calm.

    waiting, running: requests on all its deployments. A model without a deployment that serves is not scaled.
    """
    least, most = model.entry.replicas.least, model.entry.replicas.most
    count = len(model.awake)
    if not count:
        model.busy_since = model.calm_since = None
        return 0
    model.busy_since = (now if model.busy_since is None else model.busy_since) if waiting else None
    is_calm = not waiting and (count == 1 or running <= count - 1)
    model.calm_since = (now if model.calm_since is None else model.calm_since) if is_calm else None
    if count < least:
        return least
    if count > most:  # a lost host has come back with its deployment
        return count - 1
    if now - model.scaled_at < COOLDOWN_S:
        return count
    if model.busy_since is not None and now - model.busy_since >= QUEUE_S:
        return min(most, count + 1)
    if model.calm_since is not None and now - model.calm_since >= CALM_S:
        return max(least, count - 1)
    return count
