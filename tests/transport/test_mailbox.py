"""Mailbox: loses no message, never raises for bad messages, leaves no file."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
import zmq

from mstar_core.errors import TransportError
from mstar_core.transport import Courier, Mailbox, Malformed, mailbox_endpoint
from mstar_core.transport.mailbox import DRAIN_LIMIT

WAIT_S = 60.0


def take(mailbox: Mailbox, count: int) -> list[bytes | Malformed]:
    """Drain until `count` messages came."""
    taken: list[bytes | Malformed] = []
    while len(taken) < count:
        assert mailbox.wait(WAIT_S), f"only {len(taken)} of {count} messages came"
        taken += mailbox.drain()
    return taken


@pytest.fixture
def mailbox(context, codec, directory):
    with Mailbox(context, mailbox_endpoint(directory, "worker-0", 1), codec) as opened:
        yield opened


@pytest.fixture
def courier(context, codec, mailbox):
    with Courier(context, codec) as opened:
        opened.connect("worker-0", mailbox.endpoint, 1)
        yield opened


def test_messages_arrive_in_order(mailbox, courier):
    sent = [b"%d" % number for number in range(500)]
    for message in sent:
        assert courier.send("worker-0", message)
    assert take(mailbox, 500) == sent


def test_a_bad_message_between_good_ones_costs_only_itself(mailbox, courier):
    for message in (b"one", b"!bad", b"two"):
        courier.send("worker-0", message)
    assert take(mailbox, 3) == [b"one", Malformed(error="ValueError: not a message", size_bytes=4), b"two"]


def test_an_empty_mailbox_neither_blocks_nor_waits_for_ever(mailbox):
    assert mailbox.drain() == []
    assert not mailbox.wait(0.01)


def test_a_drain_stops_at_its_limit_and_wait_still_sees_the_rest(mailbox, courier):
    for number in range(5):
        courier.send("worker-0", b"%d" % number)
    taken: list[bytes | Malformed] = []
    while len(taken) < 5:
        assert mailbox.wait(WAIT_S)
        batch = mailbox.drain(limit=2)
        assert len(batch) <= 2
        taken += batch
    assert taken == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("before_attach", [0, 3, 2 * DRAIN_LIMIT + 7])
def test_a_loop_gets_what_came_before_and_after_it_was_attached(mailbox, courier, before_attach):
    """The descriptor is edge triggered: messages that wait at attach give no edge."""

    async def receive() -> list[bytes | Malformed]:
        loop = asyncio.get_running_loop()
        taken: list[bytes | Malformed] = []
        complete = asyncio.Event()

        def collect(batch: list[bytes | Malformed]) -> None:
            taken.extend(batch)
            if len(taken) == before_attach + 600:
                complete.set()

        mailbox.attach(loop, collect)
        for number in range(600):
            courier.send("worker-0", b"%d" % (before_attach + number))
            if number % 50 == 0:
                await asyncio.sleep(0)
        await asyncio.wait_for(complete.wait(), WAIT_S)
        mailbox.detach()
        return taken

    for number in range(before_attach):
        courier.send("worker-0", b"%d" % number)
    if before_attach:
        assert mailbox.wait(WAIT_S)
    assert asyncio.run(receive()) == [b"%d" % number for number in range(before_attach + 600)]


def test_a_callback_that_raises_does_not_lose_later_messages(mailbox, courier):
    async def receive() -> tuple[list[bytes], int]:
        loop = asyncio.get_running_loop()
        taken: list[bytes] = []
        failures: list[object] = []
        last = asyncio.Event()
        loop.set_exception_handler(lambda _loop, facts: failures.append(facts["exception"]))

        def collect(batch: list[bytes | Malformed]) -> None:
            taken.extend(message for message in batch if isinstance(message, bytes))
            if b"last" in batch:
                last.set()
            raise RuntimeError("a bug in a handler")

        mailbox.attach(loop, collect)
        for _ in range(DRAIN_LIMIT + 20):
            courier.send("worker-0", b"x")
        courier.send("worker-0", b"last")
        await asyncio.wait_for(last.wait(), WAIT_S)
        mailbox.detach()
        return taken, len(failures)

    taken, failures = asyncio.run(receive())
    assert len(taken) == DRAIN_LIMIT + 21
    assert failures >= 2


def test_after_detach_nothing_is_called_and_nothing_is_lost(mailbox, courier):
    async def turn() -> None:
        mailbox.attach(asyncio.get_running_loop(), lambda batch: pytest.fail(f"called with {batch}"))
        mailbox.detach()
        mailbox.detach()
        courier.send("worker-0", b"later")
        await asyncio.sleep(0)

    asyncio.run(turn())
    assert take(mailbox, 1) == [b"later"]


def test_the_socket_file_is_private_and_goes_with_the_mailbox(context, codec, directory):
    mailbox = Mailbox(context, mailbox_endpoint(directory, "api", 3), codec)
    assert stat.S_IMODE((directory / "api.3").stat().st_mode) == 0o600
    mailbox.close()
    mailbox.close()
    assert list(directory.iterdir()) == []


def test_a_path_longer_than_the_system_allows_is_named(context, codec, directory):
    deep = directory / ("d" * 100)
    with pytest.raises(TransportError, match="too long.*107.*MSTAR_RUNTIME_DIR"):
        Mailbox(context, mailbox_endpoint(deep, "worker-0", 1), codec)
    assert not deep.exists()


def test_the_longest_allowed_path_works(context, codec, directory):
    name = "w" * (107 - len(str(directory)) - len("/.1"))
    with Mailbox(context, mailbox_endpoint(directory, name, 1), codec) as mailbox:
        assert mailbox.drain() == []


def test_a_taken_name_is_refused_and_its_holder_keeps_it(context, codec, mailbox, courier):
    with pytest.raises(TransportError, match="exists already"):
        Mailbox(context, mailbox.endpoint, codec)
    courier.send("worker-0", b"still here")
    assert take(mailbox, 1) == [b"still here"]


def test_a_directory_that_others_can_open_is_refused(context, codec, directory: Path):
    directory.chmod(0o755)
    with pytest.raises(TransportError, match="open to others.*0700"):
        Mailbox(context, mailbox_endpoint(directory, "api", 1), codec)


def test_a_missing_directory_is_made_private(context, codec, directory: Path):
    with Mailbox(context, mailbox_endpoint(directory / "ipc", "api", 1), codec):
        assert stat.S_IMODE((directory / "ipc").stat().st_mode) == 0o700


def test_an_endpoint_that_zmq_refuses_is_an_error_with_a_name(context, codec):
    with pytest.raises(TransportError, match="nonsense://x"):
        Mailbox(context, "nonsense://x", codec)


def test_tcp_needs_no_file(context, codec):
    with Mailbox(context, "tcp://127.0.0.1:*", codec) as mailbox:
        assert mailbox.drain() == []


def test_multipart_frames_are_each_a_message(context, codec, mailbox):
    socket = context.socket(zmq.PUSH)
    socket.connect(mailbox.endpoint)
    socket.send_multipart([b"a", b"!b", b"c"])
    assert [type(item) for item in take(mailbox, 3)] == [bytes, Malformed, bytes]
    socket.close(0)
