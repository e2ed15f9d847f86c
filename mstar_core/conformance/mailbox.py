"""Fake mailboxes of the in-process runtime. Messages keep their order and pass the wire format."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection

from mstar_core.messages.wire import Envelope, Message, WireCodec
from mstar_core.messages.work import RunWalks


class MailboxNetwork:
    """Mailboxes by name. walks: names of all walks that were sent to a rank.

    slow: (sender, receiver) of links whose messages take one turn longer. Messages of one sender keep their order;
    those of two senders may not, as between hosts.
    """

    def __init__(self, slow: Collection[tuple[str, str]] = ()) -> None:
        self.walks: set[str] = set()
        self._slow = frozenset(slow)
        self._late: list[tuple[str, Envelope]] = []
        self._boxes: defaultdict[str, deque[Envelope]] = defaultdict(deque)

    @property
    def waiting(self) -> int:
        """Number of messages that no receiver has taken."""
        return len(self._late) + sum(len(box) for box in self._boxes.values())

    def turn(self) -> None:
        """Begin a turn: deliver the delayed messages."""
        late, self._late = self._late, []
        for name, envelope in late:
            self._boxes[name].append(envelope)

    def deliver(self, name: str, envelope: Envelope) -> None:
        """Deliver a message to a mailbox, or delay it by one turn on a slow link."""
        if isinstance(envelope.body, RunWalks):
            self.walks.update(run.walk for run in envelope.body.runs)
        if (envelope.sender, name) in self._slow:
            self._late.append((name, envelope))
        else:
            self._boxes[name].append(envelope)

    def take(self, name: str) -> list[Envelope]:
        """Return and remove all messages of a mailbox, oldest first."""
        taken = list(self._boxes[name])
        self._boxes[name].clear()
        return taken


class FakeMailbox:
    """Mailbox and courier of one process."""

    def __init__(self, post: MailboxNetwork, name: str) -> None:
        self._post = post
        self._name = name
        self._codec = WireCodec(name, 1)

    def send(self, name: str, message: Message) -> bool:
        """Send a message. The receiver gets its own copy, decoded from bytes."""
        self._post.deliver(name, self._codec.decode(self._codec.encode(message)))
        return True

    def drain(self) -> list[Envelope]:
        """Return and remove all received messages."""
        return self._post.take(self._name)

    def wait(self, timeout_s: float, *, spin_s: float = 0.0) -> None:
        """Return at once: the runtime drives each process itself."""
