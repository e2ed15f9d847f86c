"""Fake courier that records messages instead of sending them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mstar_core.errors import PeerStalled


@dataclass
class FakeCourier:
    """sent: receivers and messages, in order. peers: endpoints by name. stalls: whether a queue is full."""

    sent: list[tuple[str, Any]] = field(default_factory=list)
    peers: dict[str, str] = field(default_factory=dict)
    stalls: Callable[[str, Any], bool] = lambda name, message: False

    def connect(self, name: str, endpoint: str, incarnation: int) -> bool:
        self.peers[name] = endpoint
        return True

    def disconnect(self, name: str, incarnation: int | None = None) -> int:
        self.peers.pop(name, None)
        return 0

    def send(self, name: str, message: Any) -> bool:
        if self.stalls(name, message):
            raise PeerStalled(f"{name} does not read its messages", peer=name)
        self.sent.append((name, message))
        return True

    def send_waiting(self) -> None:
        pass  # nothing waits for room

    def of(self, kind: type) -> list[Any]:
        """Return the messages of a type."""
        return [message for _, message in self.sent if isinstance(message, kind)]

    def kinds(self) -> list[type]:
        """Return the types of all messages."""
        return [type(message) for _, message in self.sent]

    def take(self) -> list[tuple[str, Any]]:
        """Return and forget all messages."""
        sent, self.sent = self.sent, []
        return sent
