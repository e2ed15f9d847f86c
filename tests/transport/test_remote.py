"""Messages between hosts: TCP with CURVE. The same promises as in the run directory, and strangers get nothing."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from mstar_core.errors import PeerStalled, TransportError
from mstar_core.messages.life import Ping
from mstar_core.messages.wire import WireCodec
from mstar_core.messages.work import CloseRequest
from mstar_core.transport import Courier, CurveKeys, Mailbox, Malformed, RemoteAccess, mailbox_endpoint
from mstar_core.transport.curve import make_keys
from mstar_core.transport.mailbox import DRAIN_LIMIT
from tests.transport.relay import Relay

WAIT_S = 60.0
HOST = "127.0.0.1"


def has_ipv6() -> bool:
    """Return whether sockets of IPv6 can be bound here."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def take(mailbox: Mailbox, count: int) -> list[bytes | Malformed]:
    """Drain until `count` messages came."""
    taken: list[bytes | Malformed] = []
    while len(taken) < count:
        assert mailbox.wait(WAIT_S), f"only {len(taken)} of {count} messages came"
        taken += mailbox.drain()
    return taken


@pytest.fixture
def keys() -> CurveKeys:
    return make_keys()


@pytest.fixture
def access(keys) -> RemoteAccess:
    return RemoteAccess(HOST, keys)


@pytest.fixture
def mailbox(context, codec, directory, access) -> Iterator[Mailbox]:
    with Mailbox(context, mailbox_endpoint(directory, "worker-0", 1), codec, remote=access) as opened:
        yield opened


@pytest.fixture
def away() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """The context of a process of another host."""
    with zmq.Context() as context:
        yield context


@pytest.fixture
def courier(away, codec, keys, mailbox) -> Iterator[Courier]:
    with Courier(away, codec, keys=keys) as opened:
        opened.connect("worker-0", mailbox.remote_endpoint, 1)
        yield opened


def test_messages_of_another_host_arrive_in_order(mailbox, courier):
    sent = [b"%d" % number for number in range(2000)]
    for message in sent:
        assert courier.send("worker-0", message)
    assert take(mailbox, len(sent)) == sent


@pytest.mark.parametrize("flooded", ["far", "near"])
@pytest.mark.parametrize("limit", [1, 2, 256])
def test_both_sockets_are_drained_in_turns_and_in_order(mailbox, courier, away, codec, flooded, limit):
    """A flood at one socket does not delay a message at the other by more than a turn."""
    with Courier(away, codec) as near:
        near.connect("worker-0", mailbox.endpoint, 1)
        busy, quiet = (courier, near) if flooded == "far" else (near, courier)
        flood = [b"flood %d" % number for number in range(600)]
        for message in flood:
            busy.send("worker-0", message)
        quiet.send("worker-0", b"quiet 0")
        quiet.send("worker-0", b"quiet 1")
        while not all(each.getsockopt(zmq.EVENTS) & zmq.POLLIN for each in mailbox._sockets):
            time.sleep(0.01)
        time.sleep(0.5)  # for the second one, which follows the first at once
        turns: list[list[bytes | Malformed]] = []
        while sum(map(len, turns)) < len(flood) + 2:
            assert mailbox.wait(WAIT_S)
            turns.append(mailbox.drain(limit))
            assert len(turns[-1]) <= limit
    taken = [message for turn in turns for message in turn]
    assert [message for message in taken if message.startswith(b"flood")] == flood
    assert [message for message in taken if message.startswith(b"quiet")] == [b"quiet 0", b"quiet 1"]
    assert sum(b"quiet 1" in turn for turn in turns[:4]) == 1


def test_a_loop_gets_the_messages_of_both_sockets(mailbox, courier, away, codec):
    """Both descriptors are edge triggered: what waits at attach gives no edge, and a full turn leaves more."""
    count = 2 * DRAIN_LIMIT + 7

    async def receive() -> list[bytes | Malformed]:
        taken: list[bytes | Malformed] = []
        complete = asyncio.Event()

        def collect(batch: list[bytes | Malformed]) -> None:
            taken.extend(batch)
            if len(taken) == 4 * count:
                complete.set()

        mailbox.attach(asyncio.get_running_loop(), collect)
        await asyncio.sleep(0.1)
        for number in range(count, 2 * count):
            send(number)
        await asyncio.wait_for(complete.wait(), WAIT_S)
        mailbox.detach()
        return taken

    with Courier(away, codec) as near:
        near.connect("worker-0", mailbox.endpoint, 1)

        def send(number: int) -> None:
            courier.send("worker-0", b"far %d" % number)
            near.send("worker-0", b"near %d" % number)

        for number in range(count):
            send(number)
        time.sleep(0.2)
        taken = asyncio.run(receive())
    for kind in (b"far", b"near"):
        messages = [message for message in taken if message.startswith(kind)]
        assert messages == [b"%s %d" % (kind, number) for number in range(2 * count)]


def test_a_mailbox_may_have_only_the_socket_for_other_hosts(context, away, codec, directory, access, keys):
    with Mailbox(context, "", codec, remote=access) as mailbox, Courier(away, codec, keys=keys) as courier:
        courier.connect("agent", mailbox.remote_endpoint, 1)
        courier.send("agent", b"welcome")
        assert take(mailbox, 1) == [b"welcome"]
        assert mailbox.endpoint == ""
    assert list(directory.iterdir()) == []


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_an_address_may_be_ipv6(context, away, codec, keys):
    access = RemoteAccess("::1", keys)
    with Mailbox(context, "", codec, remote=access) as mailbox, Courier(away, codec, keys=keys) as courier:
        assert mailbox.remote_endpoint.startswith("tcp://[::1]:")
        courier.connect("agent", mailbox.remote_endpoint, 1)
        courier.send("agent", b"welcome")
        assert take(mailbox, 1) == [b"welcome"]


def test_an_agent_has_keys_of_its_own_and_accepts_its_owner(context, away, codec, keys):
    own = make_keys()
    access = RemoteAccess(HOST, own, accepts=keys.public)
    with Mailbox(context, "", codec, remote=access) as mailbox, Courier(away, codec, keys=keys) as courier:
        courier.connect("agent", mailbox.remote_endpoint, 1, server_key=own.public)
        courier.send("agent", b"welcome")
        assert take(mailbox, 1) == [b"welcome"]


def plain(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """A client without CURVE."""


def other_pair(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """A client that knows the public key of the server."""
    stranger = make_keys()
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, stranger.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, stranger.secret)


def other_server(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """A client with the right pair that expects another server."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, make_keys().public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)


@pytest.mark.parametrize("secure", [plain, other_pair, other_server])
def test_a_stranger_delivers_nothing_and_disturbs_nothing(mailbox, courier, away, keys, secure):
    with away.socket(zmq.PUSH) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        secure(stranger, keys)
        stranger.connect(mailbox.remote_endpoint)
        for _ in range(10):
            stranger.send(b"evil")
        for number in range(10):
            courier.send("worker-0", b"%d" % number)
            time.sleep(0.03)
        assert take(mailbox, 10) == [b"%d" % number for number in range(10)]
        assert not mailbox.wait(0.3)


@pytest.mark.parametrize("seed", range(3))
def test_garbage_at_the_port_disturbs_nothing(mailbox, courier, seed):
    """Greetings of ZMTP 3 with CURVE, cut and followed by random bytes, and plain random bytes."""
    noise = random.Random(seed)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    address = mailbox.remote_endpoint.removeprefix("tcp://").split(":")
    for _ in range(40):
        data = greeting[: noise.choice([0, 11, 12, 32, 64])] + noise.randbytes(noise.choice([0, 1, 9, 300, 5000]))
        with socket.create_connection((address[0], int(address[1])), timeout=WAIT_S) as connection:
            connection.sendall(data)
    courier.send("worker-0", b"still here")
    assert take(mailbox, 1) == [b"still here"]
    assert not mailbox.wait(0.1)


def test_a_broken_connection_is_made_again(mailbox, away, codec, keys):
    relay = Relay(mailbox.remote_endpoint)
    with Courier(away, codec, keys=keys) as courier:
        courier.connect("worker-0", relay.endpoint, 1)
        for number in range(3):
            courier.send("worker-0", b"before %d" % number)
            assert take(mailbox, 1) == [b"before %d" % number]
            relay.cut()
            while relay.accepted < number + 2:  # until ZMQ has noticed, because a message on the way may be lost
                time.sleep(0.01)
        for number in range(500):
            courier.send("worker-0", b"%d" % number)
        assert take(mailbox, 500) == [b"%d" % number for number in range(500)]
    relay.close()
    assert not mailbox.wait(0.1)


def test_messages_to_a_host_that_does_not_answer_wait_up_to_the_limit(away, context, directory, keys, access):
    """Nothing blocks; messages that end something wait beyond the limit; all arrive when the peer is there."""
    with socket.create_server((HOST, 0)) as reserved:
        port = reserved.getsockname()[1]
    wire = WireCodec("worker-0", 1)
    with Courier(away, wire, queue_messages=5, keys=keys) as courier:
        courier.connect("peer", f"tcp://{HOST}:{port}", 1)
        begun = time.monotonic()
        sent = 0
        with pytest.raises(PeerStalled):
            for sent in range(100):
                courier.send("peer", _close(sent) if sent < 5 else Ping(seq=1))
        courier.send("peer", _close(5))
        assert time.monotonic() - begun < WAIT_S, "nothing waits for the peer"
        assert sent == 5
        late = access._replace(ports=(port, port))
        with Mailbox(context, "", WireCodec("peer", 1), remote=late) as mailbox:
            numbers: list[int] = []
            while len(numbers) < 6:
                assert mailbox.wait(WAIT_S)
                courier.send_waiting()
                numbers += [item.body.handle for item in mailbox.drain()]
    assert numbers == list(range(6))


def _close(handle: int) -> CloseRequest:
    return CloseRequest(handle=handle)


def test_tcp_without_keys_is_an_error_with_the_peers_name(away, codec):
    with Courier(away, codec) as courier, pytest.raises(TransportError, match="worker-3.*no keys"):
        courier.connect("worker-3", "tcp://127.0.0.1:1", 1)


def test_a_key_that_is_none_is_an_error_with_the_peers_name(away, codec, keys):
    with Courier(away, codec, keys=keys) as courier, pytest.raises(TransportError, match="worker-3"):
        courier.connect("worker-3", "tcp://127.0.0.1:1", 1, server_key="nonsense")


def opened_soon(context: zmq.Context, codec, access: RemoteAccess) -> Mailbox:
    """Open a mailbox once the library's thread has given back the port of a closed one."""
    end = time.monotonic() + 60.0
    while True:
        try:
            return Mailbox(context, "", codec, remote=access)
        except TransportError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def test_ports_come_from_the_range_and_its_end_is_an_error(codec, keys):
    with socket.create_server((HOST, 0)) as reserved:
        first = reserved.getsockname()[1]
    access = RemoteAccess(HOST, keys, (first, first + 1))
    contexts = [zmq.Context() for _ in range(3)]
    opened: list[Mailbox] = []
    try:
        opened += [Mailbox(each, "", codec, remote=access) for each in contexts[:2]]
        ports = {int(mailbox.remote_endpoint.rpartition(":")[2]) for mailbox in opened}
        assert ports == {first, first + 1}
        with pytest.raises(TransportError, match=f"{first}-{first + 1}.*ray.ports"):
            Mailbox(contexts[2], "", codec, remote=access)
        opened[0].close()
        opened.append(opened_soon(contexts[2], codec, access))
    finally:
        for mailbox in opened:
            mailbox.close()
        for context in contexts:
            context.destroy(linger=0)


def test_a_failed_mailbox_leaves_nothing(context, codec, directory, keys):
    elsewhere = RemoteAccess("192.0.2.1", keys)  # an address of no host
    for _ in range(2):
        with pytest.raises(TransportError, match="192.0.2.1.*ray.network"):
            Mailbox(context, mailbox_endpoint(directory, "api", 1), codec, remote=elsewhere)
        assert list(directory.iterdir()) == []


def test_watched_descriptors_wake_both_kinds_of_loop(mailbox):
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    calls: list[str] = []

    def take_event() -> None:
        try:
            os.eventfd_read(fd)
            calls.append("event")
        except BlockingIOError:
            pass

    mailbox.watch(fd, take_event)
    assert not mailbox.wait(0.01)
    os.eventfd_write(fd, 1)
    assert mailbox.wait(WAIT_S)
    assert mailbox.drain() == []
    assert calls == ["event"]
    assert not mailbox.wait(0.01)

    async def turn() -> None:
        mailbox.attach(asyncio.get_running_loop(), lambda batch: pytest.fail(f"called with {batch}"))
        os.eventfd_write(fd, 1)
        await wait_until(lambda: len(calls) == 2)
        mailbox.detach()
        mailbox.unwatch(fd)
        mailbox.unwatch(fd)

    asyncio.run(turn())
    os.eventfd_write(fd, 1)
    assert not mailbox.wait(0.01)
    os.close(fd)


async def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
