"""Mailbox names of processes."""

from __future__ import annotations

from typing import Final

API: Final = "api"
CONDUCTOR: Final = "conductor"
SUPERVISOR: Final = "supervisor"


def worker_name(rank: int) -> str:
    """Return the mailbox name of a rank's worker."""
    return f"worker-{rank}"


def follower_name(rank: int) -> str:
    """Return the mailbox name of a rank that follows in a tensor-parallel group."""
    return f"follower-{rank}"


def process_rank(name: str) -> int | None:
    """Return the rank of a worker or follower, None for other processes."""
    kind, _, number = name.partition("-")
    return int(number) if kind in ("worker", "follower") and number.isdigit() else None


def rank_of(name: str) -> int | None:
    """Return the rank of a worker's mailbox name, None for other processes."""
    kind, _, number = name.partition("-")
    return int(number) if kind == "worker" and number.isdigit() else None


def agent_name(host: str) -> str:
    """Return the mailbox name of the agent of another host."""
    return f"agent-{host}"


def weights_name(host: str) -> str:
    """Return the name of the process that prepares the weights on a host, empty for the supervisor's."""
    return f"weights-{host}" if host else "weights"
