"""The courier never blocks, keeps order, loses no accepted message, and a stalled peer loses only its own messages."""

from __future__ import annotations

import pytest
import zmq

from mstar_core.errors import PeerStalled, TransportError
from mstar_core.messages.life import LogLevel
from mstar_core.messages.wire import WireCodec
from mstar_core.messages.work import CloseRequest
from mstar_core.transport import Courier, Mailbox, Malformed, mailbox_endpoint

WAIT_S = 60.0
BULK = 64 * 1024  # large enough that the buffers of the system fill after a few
QUEUE = 20


def bulk(number: int) -> bytes:
    return b"%06d" % number + bytes(BULK)


def number_of(message: bytes | Malformed) -> int:
    assert isinstance(message, bytes)
    return int(message[:6])


@pytest.fixture
def mailbox(context, codec, directory):
    with Mailbox(context, mailbox_endpoint(directory, "worker-0", 1), codec, queue_messages=2) as opened:
        yield opened


@pytest.fixture
def courier(context, codec, mailbox):
    with Courier(context, codec, queue_messages=QUEUE) as opened:
        opened.connect("worker-0", mailbox.endpoint, 1)
        yield opened


def fill(courier: Courier, name: str = "worker-0") -> int:
    """Send until the peer counts as stalled. Returns how many messages were accepted."""
    for number in range(10_000):
        try:
            courier.send(name, bulk(number))
        except PeerStalled:
            return number
    raise AssertionError("an unread peer took ten thousand messages")


def drain_all(mailbox: Mailbox, count: int) -> list[int]:
    taken: list[int] = []
    while len(taken) < count:
        assert mailbox.wait(WAIT_S), f"only {len(taken)} of {count} came"
        taken += [number_of(message) for message in mailbox.drain()]
    return taken


def test_a_peer_that_does_not_read_is_an_error_for_the_message_and_nothing_else(courier, mailbox):
    accepted = fill(courier)
    assert QUEUE // 2 <= accepted < QUEUE + 100, "the queue is bounded: ZMQ's, and the buffers of the system"
    with pytest.raises(PeerStalled) as stalled:
        courier.send("worker-0", bulk(accepted))
    assert stalled.value.facts["peer"] == "worker-0"
    assert drain_all(mailbox, accepted) == list(range(accepted))
    assert courier.send("worker-0", bulk(0)), "a peer that reads again gets messages again"


def test_messages_that_end_something_wait_for_room_and_are_not_lost(context, directory):
    wire = WireCodec("api", 1)
    endings = [CloseRequest(handle=number) for number in range(500)]
    with (
        Mailbox(context, mailbox_endpoint(directory, "worker-0", 1), wire, queue_messages=2) as mailbox,
        Courier(context, wire, queue_messages=QUEUE) as courier,
    ):
        courier.connect("worker-0", mailbox.endpoint, 1)
        with pytest.raises(PeerStalled):
            for _ in range(10_000):
                courier.send("worker-0", LogLevel(level="x" * BULK))
        assert all(courier.send("worker-0", message) for message in endings)
        with pytest.raises(PeerStalled):
            courier.send("worker-0", LogLevel(level="x" * BULK))
        taken: list[object] = []
        while endings[-1] not in taken:
            courier.send_waiting()
            assert mailbox.wait(WAIT_S)
            taken += [envelope.body for envelope in mailbox.drain()]
        assert [message for message in taken if isinstance(message, CloseRequest)] == endings


def test_messages_that_wait_for_a_dead_peer_go_with_it(context, directory, monkeypatch):
    monkeypatch.setattr("mstar_core.transport.courier.MOST_WAITING", 3)
    wire = WireCodec("api", 1)
    with Courier(context, wire, queue_messages=1) as courier:
        courier.connect("worker-0", f"ipc://{directory}/none.1", 1)
        sent = 0
        with pytest.raises(PeerStalled):  # what waits is bounded too
            for sent in range(100):
                courier.send("worker-0", CloseRequest(handle=sent))
        assert 3 <= sent < 10
        courier.disconnect("worker-0")
        courier.send_waiting()
        assert courier.peers == {}


def test_a_stalled_peer_does_not_hold_up_another(context, codec, directory, courier):
    with Mailbox(context, mailbox_endpoint(directory, "worker-1", 1), codec) as other:
        courier.connect("worker-1", other.endpoint, 1)
        fill(courier)
        assert courier.send("worker-1", b"hello")
        assert other.wait(WAIT_S)
        assert other.drain() == [b"hello"]


def test_a_later_message_does_not_overtake_those_that_wait(courier, mailbox):
    accepted = fill(courier)
    taken = [number_of(message) for message in mailbox.drain()]
    sent_late = 0
    while len(taken) < accepted + sent_late or sent_late < 30:
        if sent_late < 30:
            try:
                courier.send("worker-0", bulk(accepted + sent_late))
                sent_late += 1
            except PeerStalled:
                pass
        assert mailbox.wait(WAIT_S)
        taken += [number_of(message) for message in mailbox.drain(limit=3)]
    assert taken == list(range(accepted + 30))


def test_a_message_to_an_unknown_peer_is_dropped(courier):
    assert courier.send("nobody", b"x") is False


def test_a_message_over_the_limit_is_refused_alone(context, codec, mailbox):
    with Courier(context, codec, message_bytes=10) as courier:
        courier.connect("worker-0", mailbox.endpoint, 1)
        with pytest.raises(TransportError, match="11 bytes for worker-0, the limit is 10"):
            courier.send("worker-0", bytes(11))
        courier.send("worker-0", bytes(10))
        assert mailbox.wait(WAIT_S)
        assert mailbox.drain() == [bytes(10)]


def test_a_message_that_does_not_encode_changes_nothing(context, mailbox):
    class Refusing:
        def encode(self, message: bytes, /) -> bytes:
            raise TypeError("cannot be encoded")

    with Courier(context, Refusing()) as courier:
        courier.connect("worker-0", mailbox.endpoint, 1)
        with pytest.raises(TypeError):
            courier.send("worker-0", b"x")
        assert not mailbox.wait(0.05)


def test_a_dead_peer_gets_no_more_messages(courier):
    fill(courier)
    courier.disconnect("worker-0")
    assert courier.send("worker-0", b"x") is False
    courier.disconnect("worker-0")
    assert courier.peers == {}


def test_nothing_of_an_earlier_life_reaches_the_successor(context, codec, directory, courier):
    fill(courier)
    with Mailbox(context, mailbox_endpoint(directory, "worker-0", 2), codec) as successor:
        assert courier.connect("worker-0", successor.endpoint, 2)
        assert courier.peers == {"worker-0": 2}
        courier.send("worker-0", b"first of the second life")
        assert successor.wait(WAIT_S)
        assert successor.drain() == [b"first of the second life"]
        assert not successor.wait(0.05)


def test_late_and_doubled_announcements_change_nothing(courier, mailbox):
    assert not courier.connect("worker-0", mailbox.endpoint, 1)
    assert not courier.connect("worker-0", mailbox.endpoint, 0)
    courier.disconnect("worker-0", incarnation=0)
    assert courier.peers == {"worker-0": 1}
    courier.disconnect("worker-0", incarnation=1)
    assert not courier.connect("worker-0", mailbox.endpoint, 1), "the news of its death came first"
    assert courier.peers == {}


def test_news_of_a_death_may_come_before_the_birth(courier):
    courier.disconnect("worker-7", incarnation=4)
    assert not courier.connect("worker-7", "ipc:///nowhere/worker-7.4", 4)


def test_a_peer_announced_before_it_is_bound_gets_everything(context, codec, directory, courier):
    endpoint = mailbox_endpoint(directory, "late", 1)
    courier.connect("late", endpoint, 1)
    courier.send("late", b"early word")
    with Mailbox(context, endpoint, codec) as late:
        assert late.wait(WAIT_S)
        assert late.drain() == [b"early word"]


def test_an_endpoint_that_zmq_refuses_leaves_the_old_connection(courier):
    with pytest.raises(TransportError, match="worker-0 at nonsense://x"):
        courier.connect("worker-0", "nonsense://x", 9)
    assert courier.peers == {"worker-0": 1}


def test_two_processes_that_both_stall_do_not_deadlock(context, codec, directory):
    """Both send into full sockets before either reads: the case where blocking sends stop for ever."""
    ends = {}
    for name in ("left", "right"):
        mailbox = Mailbox(context, mailbox_endpoint(directory, name, 1), codec, queue_messages=2)
        ends[name] = (mailbox, Courier(context, codec, queue_messages=QUEUE))
    ends["left"][1].connect("right", ends["right"][0].endpoint, 1)
    ends["right"][1].connect("left", ends["left"][0].endpoint, 1)
    to_right, to_left = fill(ends["left"][1], "right"), fill(ends["right"][1], "left")
    assert drain_all(ends["right"][0], to_right) == list(range(to_right))
    assert drain_all(ends["left"][0], to_left) == list(range(to_left))
    for mailbox, courier in ends.values():
        courier.close()
        mailbox.close()


class StaleSocket:
    """A PUSH socket that refuses its first message although there is room, as ZMQ may when it has not looked yet."""

    def __init__(self) -> None:
        self.refusals = 1
        self.sent: list[bytes] = []

    def send(self, data: bytes, flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if self.refusals:
            self.refusals -= 1
            raise zmq.Again
        self.sent.append(data)

    def getsockopt(self, option: int) -> int:
        assert option == zmq.EVENTS
        return zmq.POLLOUT

    def setsockopt(self, option: int, value: int) -> None: ...
    def connect(self, endpoint: str) -> None: ...
    def close(self, linger: int) -> None: ...


class StaleContext:
    def __init__(self) -> None:
        self.made = StaleSocket()

    def socket(self, kind: int) -> StaleSocket:
        return self.made


def test_a_refusal_that_is_out_of_date_is_not_a_stall(codec):
    context = StaleContext()
    with Courier(context, codec) as courier:
        courier.connect("worker-0", "ipc:///unused", 1)
        courier.send("worker-0", b"the last message")
        assert context.made.sent == [b"the last message"]
