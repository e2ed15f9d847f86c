"""The cable between the hosts of a proof: frames arrive late, in order, or not at all."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.hosts.link import carry

DELAY_S = 0.05


@contextmanager
def cable(loss: float) -> Iterator[tuple[socket.socket, socket.socket, int]]:
    """A cable between two sockets, which stand for devices. Yields them and the descriptor for commands."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    (first, one), (second, other) = pairs
    one.setblocking(False)
    other.setblocking(False)
    second.settimeout(0.5)
    commands, control = os.pipe()
    thread = threading.Thread(target=carry, args=((one.fileno(), other.fileno()), commands, DELAY_S, loss))
    thread.start()
    try:
        yield first, second, control
    finally:
        os.close(control)
        thread.join()
        os.close(commands)
        for pair in pairs:
            for end in pair:
                end.close()


def test_frames_arrive_in_order_after_the_delay() -> None:
    with cable(loss=0) as (first, second, _):
        start = time.monotonic()
        for number in range(20):
            first.send(bytes([number]))
        assert [second.recv(9) for _ in range(20)] == [bytes([number]) for number in range(20)]
        assert time.monotonic() - start >= DELAY_S


def test_a_share_of_the_frames_is_lost() -> None:
    with cable(loss=0.5) as (first, second, _):
        for number in range(100):
            first.send(bytes([number]))
        arrived = []
        try:
            while True:
                arrived.append(second.recv(9)[0])
        except TimeoutError:
            assert 20 < len(arrived) < 80
        assert arrived == sorted(arrived)


def test_a_cut_cable_loses_all_frames_until_it_is_mended() -> None:
    with cable(loss=0) as (first, second, control):
        os.write(control, b"down\n")
        time.sleep(DELAY_S)
        first.send(b"lost")
        time.sleep(DELAY_S)
        os.write(control, b"up\n")
        time.sleep(DELAY_S)
        first.send(b"kept")
        assert second.recv(9) == b"kept"
