"""Messages between the parts of a bench: in order, without sockets, each through the wire format. Owned by a bench."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection

from mstar_core.messages.wire import Envelope, Message, WireCodec
from mstar_core.messages.work import RunWalks


class Post:
    """Mailboxes by name. walks: names of all walks that were handed to a rank.

    slow: (sender, receiver) of links whose messages take a turn longer than the others: between hosts, messages of
    one sender keep their order, and those of two do not.
    """

    def __init__(self, slow: Collection[tuple[str, str]] = ()) -> None:
        self.walks: set[str] = set()
        self._slow = frozenset(slow)
        self._late: list[tuple[str, Envelope]] = []
        self._boxes: defaultdict[str, deque[Envelope]] = defaultdict(deque)

    @property
    def waiting(self) -> int:
        """Messages that nobody has taken."""
        return len(self._late) + sum(len(box) for box in self._boxes.values())

    def turn(self) -> None:
        """A turn begins: what was late comes now."""
        late, self._late = self._late, []
        for name, envelope in late:
            self._boxes[name].append(envelope)

    def deliver(self, name: str, envelope: Envelope) -> None:
        """Put a message into a mailbox."""
        if isinstance(envelope.body, RunWalks):
            self.walks.update(run.walk for run in envelope.body.runs)
        if (envelope.sender, name) in self._slow:
            self._late.append((name, envelope))
        else:
            self._boxes[name].append(envelope)

    def take(self, name: str) -> list[Envelope]:
        """Empty a mailbox, first come first."""
        taken = list(self._boxes[name])
        self._boxes[name].clear()
        return taken


class PostBox:
    """One part's place at the post: what a courier and a mailbox are to a process."""

    def __init__(self, post: Post, name: str) -> None:
        self._post = post
        self._name = name
        self._codec = WireCodec(name, 1)

    def send(self, name: str, message: Message) -> bool:
        """Send as a courier does: the other side gets its own copy, as decoded from bytes."""
        self._post.deliver(name, self._codec.decode(self._codec.encode(message)))
        return True

    def drain(self) -> list[Envelope]:
        """What came in."""
        return self._post.take(self._name)

    def flush(self) -> None:
        """Nothing is ever held back."""

    def blocked(self) -> tuple[()]:
        """Nobody is ever slow to read."""
        return ()

    def wait(self, timeout_s: float, *, writable: object = (), spin_s: float = 0.0) -> None:
        """A bench turns its parts itself, so none of them waits."""
