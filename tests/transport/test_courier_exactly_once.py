"""P2: any interleaving of send, receive, stall and death between peers: no deadlock, nothing lost or doubled."""

from __future__ import annotations

import shutil
import tempfile
from itertools import count
from pathlib import Path

import zmq
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mstar_core.errors import PeerStalled
from mstar_core.transport import Courier, Mailbox, Malformed, mailbox_endpoint

WAIT_S = 60.0
QUEUE = 6
NAMES = st.sampled_from(["left", "right"])
SIZES = st.sampled_from([8, 2_000, 120_000])  # the last one fills the buffers of the system


class Bang:
    """Messages are bytes; those that begin with `!` do not decode."""

    def encode(self, message: bytes, /) -> bytes:
        return message

    def decode(self, data: bytes, /) -> bytes:
        if data.startswith(b"!"):
            raise ValueError("not a message")
        return data


class Life:
    """One incarnation of a peer: its mailbox, and the numbers that were accepted for it and that came out of it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path, name: str, incarnation: int) -> None:
        self.incarnation = incarnation
        self.mailbox = Mailbox(context, mailbox_endpoint(directory, name, incarnation), Bang(), queue_messages=1)
        self.accepted: list[int] = []
        self.bad: set[int] = set()
        self.received: list[int | None] = []

    def take(self, limit: int) -> None:
        for message in self.mailbox.drain(limit):
            self.received.append(None if isinstance(message, Malformed) else int(message[1:9]))

    @property
    def expected(self) -> list[int | None]:
        return [None if number in self.bad else number for number in self.accepted]


class TwoPeers(RuleBasedStateMachine):
    """A sender and two receivers that stall, die and come back, over real sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.directory = Path(tempfile.mkdtemp(prefix="mstar-"))
        self.courier = Courier(self.context, Bang(), queue_messages=QUEUE)
        self.numbers = count()
        self.lives = {name: self.give_birth(name, 0) for name in ("left", "right")}

    def give_birth(self, name: str, incarnation: int) -> Life:
        life = Life(self.context, self.directory, name, incarnation)
        assert self.courier.connect(name, life.mailbox.endpoint, incarnation)
        return life

    @rule(name=NAMES, size=SIZES, burst=st.integers(1, 8), is_bad=st.booleans())
    def send(self, name: str, size: int, burst: int, is_bad: bool) -> None:
        life = self.lives[name]
        for _ in range(burst):
            number = next(self.numbers)
            message = (b"!" if is_bad else b".") + (b"%08d" % number) + bytes(size)
            try:
                assert self.courier.send(name, message)
            except PeerStalled:
                assert len(life.accepted) - len(life.received) >= QUEUE // 2, "ZMQ refuses until half is read"
                continue
            life.accepted.append(number)
            if is_bad:
                life.bad.add(number)

    @rule(name=NAMES, limit=st.integers(1, 5))
    def receive(self, name: str, limit: int) -> None:
        self.lives[name].take(limit)

    @rule(name=NAMES)
    def catch_up(self, name: str) -> None:
        """Everything that was accepted comes, in order, once: also after any number of stalls."""
        life = self.lives[name]
        while len(life.received) < len(life.accepted):
            assert life.mailbox.wait(WAIT_S), "accepted messages do not come"
            life.take(100)
        assert life.received == life.expected

    @rule(name=NAMES, is_announced_late=st.booleans())
    def die_and_return(self, name: str, is_announced_late: bool) -> None:
        life = self.lives[name]
        life.mailbox.close()
        if not is_announced_late:
            self.courier.disconnect(name, life.incarnation)
        self.lives[name] = self.give_birth(name, life.incarnation + 1)
        self.courier.disconnect(name, life.incarnation)
        assert not self.courier.connect(name, life.mailbox.endpoint, life.incarnation)

    @invariant()
    def what_came_is_a_beginning_of_what_was_accepted(self) -> None:
        for life in self.lives.values():
            assert life.received == life.expected[: len(life.received)]

    def teardown(self) -> None:
        for name in self.lives:
            self.catch_up(name)
        self.courier.close()
        for life in self.lives.values():
            life.mailbox.close()
        self.context.destroy(linger=0)
        assert list(self.directory.iterdir()) == []
        shutil.rmtree(self.directory)


TestTwoPeers = TwoPeers.TestCase
TestTwoPeers.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
