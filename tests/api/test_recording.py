"""Recording of a connection: what the next process reads, whenever the one that writes is killed."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from mstar_core.api.handover.recording import (
    DRAWN_BYTES,
    KEPT_PAGES_BYTES,
    REQUEST_BYTES,
    RESPONSE_BYTES,
    WRITTEN_BYTES,
    ConnectionRecording,
    counted_bytes,
)

Made = tuple[ConnectionRecording, int]


@pytest.fixture
def made() -> Iterator[Made]:
    """A recording and its descriptor."""
    recording, fd = ConnectionRecording.create()
    yield recording, fd
    recording.close()
    os.close(fd)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection, the server's first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        yield server, client


def seen(fd: int) -> ConnectionRecording:
    """The recording as another process reads it."""
    return ConnectionRecording.adopt(fd)


def test_the_kernel_counts_each_byte_once_whether_read_or_not(pair: tuple[socket.socket, socket.socket]) -> None:
    server, client = pair
    base, sent = counted_bytes(server), 0
    server.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            sent += server.send(b"x" * 100_000)
            assert counted_bytes(server) - base == sent
    received = len(client.recv(1 << 20))
    while received < sent:
        received += len(client.recv(1 << 20))
        assert counted_bytes(server) - base == sent


def test_a_connection_without_a_byte_is_followed_from_its_adoption(
    made: Made, pair: tuple[socket.socket, socket.socket]
) -> None:
    server, client = pair
    adopted = seen(made[1])  # the other process died between the accept() and its first look at the connection
    assert adopted.unsent(server) == b""
    adopted.sent([b"answer"], 0)
    server.sendall(b"ans")
    assert client.recv(3) == b"ans"
    assert adopted.unsent(server) == b"wer"


def test_the_request_in_progress_is_kept_and_ends_with_the_last_write(made: Made) -> None:
    recording, fd = made
    recording.received(b"POST / HTTP/1.1\r\n\r\n")
    recording.begin("req", "trace", 1.5, 2.5)
    recording.received(b"body")
    other = seen(fd)
    assert other.request() == b"POST / HTTP/1.1\r\n\r\nbody"
    assert other.record.is_active and (other.record.request_id, other.record.started) == ("req", 1.5)
    recording.received(b"NEXT")
    recording.ends(unread=4)
    recording.sent([b"answer"], 0)
    other = seen(fd)
    assert (other.record.is_active, other.request(), other.response(0)) == (False, b"NEXT", b"answer")


def test_what_a_response_holds_counts_with_its_bytes(made: Made) -> None:
    recording, fd = made
    recording.begin("req", "trace", 0.0, 0.0)
    recording.holds([{"text": 1}], 1, 1)
    recording.sent([b"one"], 0)
    recording.holds([{"text": 2}], 1, 2)
    recording.prepare(6, 3)
    recording.fill(b"two")
    record = seen(fd).record
    assert (record.total, record.units, record.events) == (3, [{"text": 1}], 1)
    recording.fill(b"end")
    recording.complete()
    other = seen(fd)
    assert (other.record.total, other.record.units, other.record.events) == (9, [{"text": 2}], 2)
    assert other.response(3) == b"twoend"


def test_a_response_that_has_ended_in_the_record_ends_once(made: Made) -> None:
    recording, fd = made
    recording.begin("req", "trace", 0.0, 0.0)
    recording.ends(unread=0, is_closing=True)
    recording.sent([b"last", b"end"], 0)
    recording.ends(unread=0)  # said again by the write itself
    assert (seen(fd).record.is_active, seen(fd).record.is_closing) == (False, True)
    recording.begin("next", "trace", 0.0, 0.0)
    recording.sent([b"first"], 0)
    assert seen(fd).record.is_active


def test_a_large_part_leaves_no_memory_behind_the_next_response(made: Made) -> None:
    recording, fd = made
    for size in (RESPONSE_BYTES, 10):
        recording.begin("req", "trace", 0.0, 0.0)
        recording.ends(unread=0)
        recording.sent([b"x" * size], 0)
    assert seen(fd).response(RESPONSE_BYTES) == b"x" * 10
    assert os.fstat(fd).st_blocks * 512 < 8 * KEPT_PAGES_BYTES


def test_bytes_that_the_client_does_not_read_are_kept_up_to_the_limit(made: Made) -> None:
    recording, fd = made
    recording.sent([b"a" * 10], 0)
    recording.sent([b"b" * (RESPONSE_BYTES - 5)], 5)
    assert seen(fd).response(5) == b"a" * 5 + b"b" * (RESPONSE_BYTES - 5)
    recording.sent([b"c"], RESPONSE_BYTES)
    assert seen(fd).response(10) is None, "a client must not get a response with a gap"
    recording.sent([b"d"], 0)
    assert seen(fd).response(RESPONSE_BYTES + 6) == b"d"


def test_a_long_request_is_not_continued_and_leaves_no_memory(made: Made) -> None:
    recording, fd = made
    recording.received(b"x" * REQUEST_BYTES)
    recording.received(b"y")
    assert seen(fd).record.request_bytes < 0
    assert os.fstat(fd).st_blocks * 512 > REQUEST_BYTES
    recording.begin("req", "trace", 0.0, 0.0)
    recording.ends(unread=0)
    recording.sent([b"answer"], 0)
    assert seen(fd).record.request_bytes == 0
    assert os.fstat(fd).st_blocks * 512 < 8 * KEPT_PAGES_BYTES


def test_drawn_ids_are_kept_until_the_next_request(made: Made) -> None:
    recording, fd = made
    recording.begin("req", "trace", 0.0, 0.0)
    for entry in (b"first", b"second"):
        recording.draw(entry)
    other = seen(fd)
    other.draw(b"third")
    assert seen(fd).drawn() == [b"first", b"second", b"third"]
    other.begin("next", "trace", 0.0, 0.0)
    assert seen(fd).drawn() == []
    other.draw(b"x" * DRAWN_BYTES)
    assert seen(fd).record.request_bytes < 0, "a request whose ids are not all known cannot go on"


def test_a_released_recording_has_no_drawn_ids_and_takes_no_request(made: Made) -> None:
    recording, _ = made
    recording.begin("req", "trace", 0.0, 0.0)
    recording.draw(b"first")
    recording.close()
    recording.begin("next", "trace", 0.0, 0.0)
    assert recording.drawn() == [], "the next request of its connection is answered all the same"


def test_long_parts_of_a_request_are_read_by_the_next_process(made: Made) -> None:
    recording, fd = made
    parts = [os.urandom(size) for size in (100, WRITTEN_BYTES, 5, 1_000_000)]
    for part in parts:
        recording.received(memoryview(part))
    assert seen(fd).request() == b"".join(parts)


def test_a_request_without_memory_for_its_bytes_cannot_be_continued(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, fd = made

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    recording.received(b"head")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        recording.received(bytes(WRITTEN_BYTES))
    recording.received(b"more")
    assert seen(fd).record.request_bytes < 0 and seen(fd).request() == b""
