"""A TCP relay between two ends whose connections a test can break or hold."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import threading
from array import array
from contextlib import ExitStack, suppress

HOST = "127.0.0.1"


class Relay:
    """Listens at `endpoint` and passes every connection on to a target.

    held: bytes received since the last `hold`; those behind them stay in the sockets. accepted: number of connections
    so far.
    """

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self._target = host, int(port)
        self._listener = socket.create_server((HOST, 0))
        self.endpoint = f"tcp://{HOST}:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.held = self.accepted = 0
        self._flows = threading.Event()
        self._flows.set()
        self._start(self._accept)

    @property
    def on_the_way(self) -> int:
        """Bytes that have come since the last `hold`, received or still in the sockets."""
        return self.held + sum(map(unread, list(self._sockets)))

    def cut(self) -> None:
        """Break all connections. New ones are served."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Break all connections that are held, and lose the bytes in them. Then pass bytes on again."""
        for each in self._sockets:
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)
        self.resume()

    def hold(self) -> None:
        """Pass no bytes on until `resume`; connections stay."""
        self.held = 0
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._flows.set()
        self.cut()
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._sockets):
            each.close()

    def _start(self, target, *arguments) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with ExitStack() as stack:
                    stack.enter_context(near)
                    far = socket.create_connection(self._target)
                    stack.pop_all()
                self._sockets += [near, far]
                self.accepted += 1
                self._start(self._copy, near, far)
                self._start(self._copy, far, near)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.held += len(data)
                self._flows.wait()
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


def unread(sock: socket.socket) -> int:
    """Return the bytes that a socket has got and no one has read, 0 if it is closed."""
    count = array("i", [0])
    with suppress(OSError, ValueError):
        fcntl.ioctl(sock, termios.FIONREAD, count)
    return count[0]
