"""Memory of CPU ranks as if each had a device of its own, so that budgets and the ledger are tried without GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from mstar_core.config.deployment import RankPlan
from mstar_core.config.sizes import parse_size
from mstar_core.errors import UsageError

VARIABLE: Final = "MSTAR_FAKE_MEMORY"


def fake_memory(environ: Mapping[str, str] = os.environ) -> dict[str, int]:
    """Return the bytes of each faked device, from a list such as `cpu:0=2GiB,cpu:1=2GiB`; empty without the variable.

    Raises UsageError for a text of another form.
    """
    made: dict[str, int] = {}
    for word in filter(None, environ.get(VARIABLE, "").split(",")):
        device, _, size = word.strip().partition("=")
        try:
            made[device] = parse_size(size)
        except ValueError:
            made[device] = 0
        if not device.startswith("cpu:") or not made[device]:
            raise UsageError(f"{VARIABLE} contains {word!r}", hint="write cpu:INDEX=SIZE, such as cpu:0=2GiB")
    return made


def ledger_device(rank: RankPlan, fakes: Sequence[str]) -> str:
    """Return the device whose memory a rank uses. fakes: of CPU ranks, which take them in turn; may be empty."""
    return fakes[rank.rank % len(fakes)] if rank.device == "cpu" and fakes else rank.device


def fake_key(device: str) -> str:
    """Return the lock key of a faked device."""
    return device.replace(":", "-")
