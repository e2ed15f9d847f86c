"""Numbers of messages between hosts: a lost message ends the link, and never goes unnoticed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from mstar_core.transport import Courier, CurveKeys, LinkBreak, Mailbox, RemoteAccess, make_keys
from mstar_core.transport.mailbox import Malformed
from mstar_core.transport.numbered import HEAD, NumberedLink, NumberedLinks
from tests.transport.relay import Relay

HOST = "127.0.0.1"
WAIT_S = 30.0
BODY = bytes(20_000)


def taken(links: NumberedLinks, *frames: bytes) -> list[bytes]:
    """Return the messages that a receiver takes of frames."""
    return [bytes(message) for message in map(links.take, frames) if message is not None]


def frames_of(link: NumberedLink, count: int) -> list[bytes]:
    """Return the frames of messages `0`, `1`, …"""
    frames = []
    for number in range(count):
        frames.append(link.frame(b"%d" % number))
        link.sent()
    return frames


def test_messages_come_once_and_marks_bring_none() -> None:
    link, links = NumberedLink("worker-0", 3), NumberedLinks()
    first, second = frames_of(link, 2)
    assert taken(links, first, second, link.mark, link.mark) == [b"0", b"1"]
    assert links.breaks == []


@pytest.mark.parametrize("missing", [(0,), (1,), (0, 1, 2), (2, 4)])
def test_nothing_is_taken_behind_a_gap(missing: tuple[int, ...]) -> None:
    link, links = NumberedLink("worker-0", 3), NumberedLinks()
    frames = [frame for number, frame in enumerate(frames_of(link, 6)) if number not in missing]
    assert taken(links, *frames, link.mark) == [b"%d" % number for number in range(missing[0])]
    lost = next(number for number in range(missing[0], 7) if number not in missing) - missing[0]
    assert links.breaks == [LinkBreak("worker-0", 3, lost)]


def test_the_loss_of_the_last_messages_shows_at_the_next_mark() -> None:
    link, links = NumberedLink("worker-0", 3), NumberedLinks()
    frames = frames_of(link, 5)
    assert taken(links, *frames[:3], link.mark) == [b"0", b"1", b"2"]
    assert links.breaks == [LinkBreak("worker-0", 3, 2)]


def test_a_mark_follows_the_last_message_once_and_at_idle_ticks_again() -> None:
    link = NumberedLink("worker-0", 3)
    link.sent()
    assert not link.is_mark_due(is_idle_tick=False), "another message may follow"
    link.sent()
    assert not link.is_mark_due(is_idle_tick=True), "the last message has the number"
    assert [link.is_mark_due(is_idle_tick=is_idle) for is_idle in (False, False, True, False, True)] == [
        *(True, False, True, False, True)
    ]


def test_a_message_that_comes_again_is_not_taken_again() -> None:
    link, links = NumberedLink("worker-0", 3), NumberedLinks()
    first, second = frames_of(link, 2)
    assert taken(links, first, second, second) == [b"0", b"1"]
    assert links.breaks == [LinkBreak("worker-0", 3, 0)]


def test_a_broken_link_affects_no_other_one() -> None:
    links = NumberedLinks()
    broken, whole, next_life = (NumberedLink(name, life) for name, life in (("a", 1), ("b", 1), ("a", 2)))
    assert taken(links, frames_of(broken, 2)[1]) == []
    assert taken(links, *frames_of(whole, 2), *frames_of(next_life, 1)) == [b"0", b"1", b"0"]


def test_a_message_that_was_not_sent_takes_no_number() -> None:
    link, links = NumberedLink("worker-0", 3), NumberedLinks()
    link.frame(b"the queue was full")
    assert taken(links, *frames_of(link, 2)) == [b"0", b"1"] and links.breaks == []


@pytest.mark.parametrize("frame", [b"", b"x", HEAD.pack(1, 0, 1) + b"a name without an end"])
def test_a_frame_without_a_number_is_malformed(frame: bytes, access: RemoteAccess, keys: CurveKeys, codec) -> None:
    with zmq.Context() as here, zmq.Context() as there, Mailbox(here, "", codec, remote=access) as mailbox:
        with Courier(there, codec, keys=keys) as courier:
            courier.connect("worker-0", mailbox.remote_endpoint, 1)
            courier._peers["worker-0"].socket.send(frame)
            assert mailbox.wait(WAIT_S)
            (item,) = mailbox.drain()
            assert isinstance(item, Malformed) and item.size_bytes == len(frame)


@pytest.fixture
def keys() -> CurveKeys:
    return make_keys()


@pytest.fixture
def access(keys: CurveKeys) -> RemoteAccess:
    return RemoteAccess(HOST, keys)


class Receiver:
    """A mailbox behind a relay, which a thread drains. messages: of the sender; breaks: that the mailbox reports."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.messages: list[bytes] = []
        self.malformed: list[Malformed] = []
        self.breaks: list[LinkBreak] = []
        self.is_over = threading.Event()
        mailbox.on_break = self.breaks.append
        self._mailbox = mailbox
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        while not self.is_over.is_set():
            self._mailbox.wait(0.02)
            for item in self._mailbox.drain():
                if isinstance(item, Malformed):
                    self.malformed.append(item)
                else:
                    self.messages.append(bytes(item[:8]))

    def close(self) -> None:
        self.is_over.set()
        self._thread.join()


@pytest.fixture
def far(access: RemoteAccess, codec) -> Iterator[tuple[Relay, Receiver]]:
    """A receiver of another host, and the relay that leads to it."""
    with zmq.Context() as context, Mailbox(context, "", codec, remote=access) as mailbox:
        relay, receiver = Relay(mailbox.remote_endpoint), Receiver(mailbox)
        yield relay, receiver
        receiver.close()
        relay.close()


@pytest.mark.parametrize(("held", "more"), [(20, 0), (400, 300)])
def test_a_connection_that_is_cut_under_load_never_hides_a_loss(
    far: tuple[Relay, Receiver], keys: CurveKeys, codec, held: int, more: int
) -> None:
    """The receiver has all messages in order, or a beginning of them and the report of a break.

    held: messages on the way. more: messages after the cut; without any, the marks alone show the loss.
    """
    relay, receiver = far
    with zmq.Context() as context, Courier(context, codec, keys=keys) as courier:
        courier.connect("worker-0", relay.endpoint, 1)
        sent = []

        def send(count: int) -> None:
            for _ in range(count):
                sent.append(b"%08d" % len(sent))
                assert courier.send("worker-0", sent[-1] + BODY)

        send(200)
        until(lambda: len(receiver.messages) == 200)
        relay.hold()  # what follows is on the way when the connection ends
        send(held)
        until(lambda: relay.on_the_way > len(BODY), courier)
        relay.drop()
        send(more)
        until(lambda: bool(receiver.breaks), courier)
        time.sleep(0.3)
    (lost,) = receiver.breaks
    assert (lost.sender, lost.incarnation) == (codec.sender, codec.incarnation) and lost.lost > 0
    assert receiver.messages == sent[: len(receiver.messages)] and receiver.malformed == []
    assert len(receiver.messages) < len(sent)


def test_a_connection_that_is_cut_without_a_message_on_the_way_is_no_break(
    far: tuple[Relay, Receiver], keys: CurveKeys, codec
) -> None:
    relay, receiver = far
    with zmq.Context() as context, Courier(context, codec, keys=keys) as courier:
        courier.connect("worker-0", relay.endpoint, 1)
        for round_number in range(3):
            courier.send("worker-0", b"%08d" % round_number)
            until(lambda count=round_number + 1: len(receiver.messages) == count, courier)
            relay.cut()
            until(lambda count=round_number + 2: relay.accepted == count, courier)  # ZMQ has noticed
        courier.send_waiting()
        time.sleep(1.5)
        courier.send_waiting()
        time.sleep(0.3)
    assert receiver.breaks == [] and len(receiver.messages) == 3


def until(is_so, courier: Courier | None = None) -> None:
    """Wait until a condition holds, and send what the sender's loop sends meanwhile."""
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end, "it does not hold in time"
        if courier is not None:
            courier.send_waiting()
        time.sleep(0.01)
