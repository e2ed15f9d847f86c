"""Judgements on children and their deaths: pure functions over what the supervisor has seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mstar_core.config.deployment import Plan
from mstar_core.errors import ExitCode
from mstar_core.messages.names import CONDUCTOR, rank_of
from mstar_core.supervisor.child import Child


def hang(child: Child, now: float, limit_s: float) -> str | None:
    """Why a child that is ready counts as hanging, or None. Only workers take steps."""
    silent = now - child.last_beat
    stuck = now - child.last_step_change if rank_of(child.name) is not None else 0.0
    if silent > limit_s:
        return f"no sign of life for {silent:.0f} s"
    return f"work is ready but no step ran for {stuck:.0f} s" if stuck > limit_s else None


def is_stalled(child: Child, now: float, limit_s: float) -> bool:
    """Whether a start stands still: no new phase, and nothing more done in it. How long it takes does not matter."""
    return now - max(child.last_progress, child.started) > limit_s


def can_serve(plan: Plan, children: Iterable[Child]) -> bool:
    """Whether a request could be taken: a conductor, and for each placement a replica whose ranks are all ready."""
    ready = {child.name for child in children if child.state == "ready"}
    ranks = {rank for name in ready if (rank := rank_of(name)) is not None}
    return CONDUCTOR in ready and all(
        any(ranks.issuperset(replica) for replica in placement.replicas) for placement in plan.placements
    )


def in_flight(values: Mapping[str, float]) -> int:
    """Requests that the conductor works for, as it told last."""
    return int(values.get("conductor.in_flight", 0))


def exit_code_of(record: dict[str, Any]) -> ExitCode:
    """The exit code of a start that failed of this: a stall, a wrong input, anything else."""
    if record.get("code") == "stalled":
        return ExitCode.TIMED_OUT
    return ExitCode.INVALID if record.get("status") == ExitCode.INVALID else ExitCode.START_FAILED


def cause_sentence(record: dict[str, Any]) -> str:
    """A death in one sentence."""
    detail = record.get("detail") or ""
    return f"{record.get('message', 'a process died')}{f' ({detail})' if detail else ''}"
