"""Names of processes as mailboxes know them."""

from __future__ import annotations

from typing import Final

API: Final = "api"
CONDUCTOR: Final = "conductor"
SUPERVISOR: Final = "supervisor"


def worker_name(rank: int) -> str:
    """The mailbox name of a rank's worker."""
    return f"worker-{rank}"


def rank_of(name: str) -> int | None:
    """The rank of a worker's mailbox name, None for other processes."""
    kind, _, number = name.partition("-")
    return int(number) if kind == "worker" and number.isdigit() else None
