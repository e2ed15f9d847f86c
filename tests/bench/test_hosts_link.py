"""The cable between the hosts of a proof: frames arrive late, in order, or not at all."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bench.hosts.link import carry

DELAY_S = 0.05
LIMIT_S = 60.0


@contextmanager
def cable(loss: float) -> Iterator[tuple[socket.socket, socket.socket, int, socket.socket]]:
    """A cable between two sockets, which stand for devices. Yields them, the descriptor for commands, and its end."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    (first, one), (second, other) = pairs
    one.setblocking(False)
    other.setblocking(False)
    second.settimeout(LIMIT_S)
    commands, control = os.pipe()
    thread = threading.Thread(target=carry, args=((one.fileno(), other.fileno()), commands, DELAY_S, loss))
    thread.start()
    try:
        yield first, second, control, one
    finally:
        os.close(control)
        thread.join()
        os.close(commands)
        for pair in pairs:
            for end in pair:
                end.close()


def test_frames_arrive_in_order_after_the_delay() -> None:
    with cable(loss=0) as (first, second, *_):
        start = time.monotonic()
        for number in range(20):
            first.send(bytes([number]))
        assert [second.recv(9) for _ in range(20)] == [bytes([number]) for number in range(20)]
        assert time.monotonic() - start >= DELAY_S


def test_a_share_of_the_frames_is_lost() -> None:
    with cable(loss=0.5) as (first, second, *_):
        for number in range(100):
            first.send(bytes([number]))
        for _ in range(30):  # one of them arrives
            first.send(b"end")
        arrived = []
        while (frame := second.recv(9)) != b"end":
            arrived.append(frame[0])
        assert 20 < len(arrived) < 80
        assert arrived == sorted(arrived)


def test_a_cut_cable_loses_all_frames_until_it_is_mended(capsys: pytest.CaptureFixture[str]) -> None:
    def says(word: str) -> bool:
        return word in capsys.readouterr().out

    with cable(loss=0) as (first, second, control, entry):
        os.write(control, b"down\n")
        until(lambda: says("down"))
        first.send(b"lost")
        until(lambda: not waiting_bytes(entry))
        os.write(control, b"up\n")
        until(lambda: says("up"))
        first.send(b"kept")
        assert second.recv(9) == b"kept"


def until(condition: Callable[[], bool]) -> None:
    """Wait for what the thread does."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def waiting_bytes(end: socket.socket) -> int:
    """Return the bytes that have arrived at a socket and were not read."""
    count = array.array("i", [0])
    fcntl.ioctl(end, termios.FIONREAD, count)
    return count[0]
