"""Cordoned ranks: replicas that the conductor does not choose for new requests. Owned by the supervisor."""

from __future__ import annotations

from collections.abc import Callable

from mstar_core.config.deployment import Plan
from mstar_core.errors import NotFound, did_you_mean
from mstar_core.messages.life import Cordon, Cordoned
from mstar_core.supervisor.operations.changes import Changes


def leaders_of(plan: Plan, rank: int) -> frozenset[int]:
    """Return the ranks that receive the requests of a rank: itself, and the leader of the group that it follows in.

    Raises NotFound for a rank that the deployment does not have.
    """
    known = {each.rank: each for each in plan.ranks}
    if rank not in known:
        names = [str(number) for number in known]
        detail = f"its ranks are {', '.join(names)}"
        raise NotFound(f"no rank {rank}", detail, did_you_mean(str(rank), names), kind="rank", name=str(rank))
    followed = [group.leader for group in plan.groups if rank in group.ranks[1:]]
    return frozenset(([rank] if known[rank].nodes else []) + followed)


class Cordons:
    """All cordoned ranks, as a level: the conductor receives the whole set at each change, and so does a new one.

    kept: cordoned by an operator, until `uncordon`. passing: by an operation, which ends them itself.
    """

    def __init__(self, send: Callable[[Cordon], object], changes: Changes) -> None:
        self.kept: frozenset[int] = frozenset()
        self.passing: frozenset[int] = frozenset()
        self._send = send
        self._changes = changes
        self._number = 0
        self._evicted: frozenset[int] = frozenset()
        self._idle: frozenset[int] | None = None  # None: the conductor has not answered the latest message

    @property
    def ranks(self) -> frozenset[int]:
        """All cordoned ranks."""
        return self.kept | self.passing

    @property
    def is_known(self) -> bool:
        """Whether the conductor follows the latest set."""
        return self._idle is not None

    @property
    def idle(self) -> frozenset[int]:
        """The cordoned ranks without requests, as far as the conductor has reported."""
        return self._idle or frozenset()

    def is_idle(self, ranks: frozenset[int]) -> bool:
        """Whether the conductor has reported that no request uses these cordoned ranks."""
        return self._idle is not None and ranks <= self._idle

    def set(self, *, kept: frozenset[int] | None = None, passing: frozenset[int] | None = None) -> None:
        """Replace the cordons of operators or of operations."""
        self.kept = self.kept if kept is None else kept
        self.passing = self.passing if passing is None else passing
        self._evicted &= self.ranks
        self.tell()

    def evict(self, ranks: frozenset[int]) -> None:
        """End the requests that still use these cordoned ranks, as the death of their workers would."""
        self._evicted |= ranks & self.ranks
        self.tell()

    def tell(self) -> None:
        """Send the cordons to the conductor."""
        self._number += 1
        self._idle = None
        self._send(Cordon(number=self._number, ranks=sorted(self.ranks), evict=sorted(self._evicted)))

    def take(self, report: Cordoned) -> None:
        """Handle a report of the conductor. A report on an earlier set is dropped."""
        if report.number == self._number:
            self._idle = frozenset(report.ranks)
            self._changes.notify()
