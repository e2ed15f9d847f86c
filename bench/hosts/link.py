"""A network cable between two namespaces that delays and loses frames: `python -m bench.hosts.link PID PID`.

It opens a TAP device in the network namespace of each process and carries Ethernet frames between them. Kernels without
netem have no other way to do that. Commands on standard input: `down` loses all frames, `up` ends that; its end closes
the devices.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final

DEVICE: Final = "tap0"
MOST_WAITING: Final = 4096
"""Frames on their way in one direction; more are lost, as in the queue of a switch."""

_TUNSETIFF: Final = 0x400454CA
_IFF_TAP: Final = 0x0002
_IFF_NO_PI: Final = 0x1000
_CLONE_NEWNET: Final = 0x40000000
_FRAME: Final = 65536


def open_tap(pid: int) -> int:
    """Return a TAP device of a process's network namespace. The calling thread stays in its own."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    enter(pid)
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TAP | _IFF_NO_PI))
    finally:
        _set_namespace(home)
        os.close(home)
    return fd


def enter(pid: int) -> None:
    """Put the calling thread into the network namespace of a process. Raises OSError."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        _set_namespace(namespace)
    finally:
        os.close(namespace)


def _set_namespace(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def carry(taps: tuple[int, int], commands: int, delay_s: float, loss: float) -> None:
    """Carry frames between two devices until the end of the commands.

    taps, commands: descriptors. loss: probability of each frame to be lost.
    """
    chance = random.Random(0)
    waiting: dict[int, deque[tuple[float, bytes]]] = {tap: deque() for tap in taps}
    other = {taps[0]: taps[1], taps[1]: taps[0]}
    is_up = True
    poll = select.epoll()
    for fd in (*taps, commands):
        poll.register(fd, select.EPOLLIN)
    while True:
        due = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        timeout = -1 if due is None else max(0.0, due - time.monotonic())
        for fd, _ in poll.poll(timeout):
            if fd == commands:
                word = os.read(commands, 64).decode().split()
                if not word:
                    return
                is_up = word[-1] == "up"
                print(word[-1], flush=True)
                continue
            for frame in _frames(fd):
                if is_up and chance.random() >= loss and len(waiting[other[fd]]) < MOST_WAITING:
                    waiting[other[fd]].append((time.monotonic() + delay_s, frame))
        _deliver(waiting)


def _frames(tap: int) -> list[bytes]:
    frames = []
    while len(frames) < 64:
        try:
            frames.append(os.read(tap, _FRAME))
        except BlockingIOError:
            break
    return frames


def _deliver(waiting: dict[int, deque[tuple[float, bytes]]]) -> None:
    now = time.monotonic()
    for tap, queue in waiting.items():
        while queue and queue[0][0] <= now:
            frame = queue.popleft()[1]
            try:
                os.write(tap, frame)
            except OSError:
                continue  # the device is down or full: the frame is lost


def main() -> None:
    """Run the link. Prints `ready` once both devices exist."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pids", type=int, nargs=2)
    parser.add_argument("--delay-ms", type=float, default=1.0, help="in each direction")
    parser.add_argument("--loss", type=float, default=0.001, help="share of frames that are lost")
    options = parser.parse_args()
    Path("/proc/self/timerslack_ns").write_text("1")
    taps = open_tap(options.pids[0]), open_tap(options.pids[1])
    print("ready", flush=True)
    try:
        carry(taps, sys.stdin.fileno(), options.delay_ms / 1000, options.loss)
    finally:
        for tap in taps:
            os.close(tap)
    sys.exit(0)


if __name__ == "__main__":
    main()
