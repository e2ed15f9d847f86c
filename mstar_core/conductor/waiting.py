"""Resumed requests that wait for a ready replica. Owned by the conductor."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mstar_core.messages.requests import NewRequest


class WaitingRequests:
    """Requests in the order of their arrival, with their deadlines."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests: dict[int, tuple[NewRequest, float]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, handle: int) -> bool:
        return handle in self._requests

    def add(self, message: NewRequest) -> None:
        """Keep a request until a replica is ready, it is cancelled, or its deadline has passed."""
        self._requests[message.handle] = message, self._clock() + message.deadline_s

    def change(self, handle: int, change: Callable[[NewRequest], NewRequest]) -> bool:
        """Replace the message of a request. Returns False if it does not wait."""
        found = self._requests.get(handle)
        if found is not None:
            self._requests[handle] = change(found[0]), found[1]
        return found is not None

    def drop(self, handle: int) -> bool:
        """Drop a request. Returns False if it does not wait."""
        return self._requests.pop(handle, None) is not None

    def take_all(self) -> list[NewRequest]:
        """Take all requests, each with the time that is left to it."""
        requests, self._requests = self._requests, {}
        now = self._clock()
        return [
            msgspec.structs.replace(message, deadline_s=max(0.001, deadline - now))
            for message, deadline in requests.values()
        ]

    def take_late(self) -> list[int]:
        """Take the requests past their deadline. Returns their handles."""
        now = self._clock()
        late = [handle for handle, (_, deadline) in self._requests.items() if deadline < now]
        for handle in late:
            del self._requests[handle]
        return late

    def clear(self) -> None:
        """Drop all requests."""
        self._requests.clear()
