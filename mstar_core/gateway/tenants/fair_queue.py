"""Queue of requests that wait for a model, in the fair order of their tenants. Pure: no clock, no event loop.

Start-time fair queueing (Goyal, Vin, Cheng: "Start-time fair queuing", SIGCOMM 1996): the request with the least start
tag is next, and a tenant's next tag is larger by the cost of its last request over its weight. Only served requests
move tags, so a request that is cancelled while it waits changes nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """One waiting request. cost: amount of work, in any unit that all requests share. item: of the caller.

    arrived: virtual time of its arrival; number: its place in the order of arrivals. The queue sets both.
    """

    tenant: str
    weight: float
    cost: float
    item: T
    arrived: float = 0.0
    number: int = 0


class FairQueue(Generic[T]):
    """A bounded fair queue. A full queue drops the newest request of the tenant with the most for its weight."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._virtual = 0.0
        self._finish: dict[str, float] = {}  # tags at which the last requests of tenants end, if they lie ahead
        self._backlogs: dict[str, deque[Ticket[T]]] = {}  # of tenants that wait, each oldest first
        self._size = 0
        self._arrivals = 0

    def __len__(self) -> int:
        return self._size

    def waiting(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""
        return len(self._backlogs.get(tenant, ()))

    def push(self, ticket: Ticket[T]) -> Ticket[T] | None:
        """Add a request. Returns the one that leaves for it if the queue is full, which may be the new one."""
        self._arrivals += 1
        ticket.arrived, ticket.number = self._virtual, self._arrivals
        self._backlogs.setdefault(ticket.tenant, deque()).append(ticket)
        self._size += 1
        if self._size <= self._limit:
            return None
        longest = max(
            self._backlogs.values(), key=lambda tickets: (len(tickets) / tickets[0].weight, tickets[-1].number)
        )
        dropped = longest[-1]
        self.remove(dropped)
        return dropped

    def peek(self) -> Ticket[T] | None:
        """Return the next request, None if none waits."""
        heads = (tickets[0] for tickets in self._backlogs.values())
        return min(heads, key=lambda ticket: (self._start(ticket), ticket.number), default=None)

    def pop(self) -> Ticket[T] | None:
        """Take out the next request and count it for its tenant. Returns None if none waits."""
        ticket = self.peek()
        if ticket is None:
            return None
        start = self._start(ticket)
        self.remove(ticket)
        self._virtual = max(self._virtual, start)
        self._finish[ticket.tenant] = start + ticket.cost / ticket.weight
        self._forget()
        return ticket

    def serve(self, tenant: str, weight: float, cost: float) -> None:
        """Count a request that did not wait."""
        start = max(self._virtual, self._finish.get(tenant, 0.0))
        self._finish[tenant] = start + cost / weight

    def remove(self, ticket: Ticket[T]) -> bool:
        """Remove a waiting request, which leaves nothing behind. Returns whether it waited."""
        tickets = self._backlogs.get(ticket.tenant, ())
        if ticket not in tickets:
            return False
        self._backlogs[ticket.tenant].remove(ticket)
        self._size -= 1
        if not tickets:
            del self._backlogs[ticket.tenant]
        return True

    def rest(self) -> None:
        """Forget all tags, when the model is idle: what a tenant used while no other waited is not held against it."""
        if not self._backlogs:
            self._virtual = 0.0
            self._finish.clear()

    def _start(self, ticket: Ticket[T]) -> float:
        """Return the start tag of the first request of a tenant."""
        return max(ticket.arrived, self._finish.get(ticket.tenant, 0.0))

    def _forget(self) -> None:
        for tenant in [name for name, finish in self._finish.items() if finish <= self._virtual]:
            if tenant not in self._backlogs:
                del self._finish[tenant]
