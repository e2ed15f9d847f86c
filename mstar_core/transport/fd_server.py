"""Hands the descriptor of an arena to readers of the same user. Owned by `ShmTransport`.

A thread, so that a reader never has to wait for the step that the owner is in.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path

from mstar_core.errors import TransportError
from mstar_core.transport.address import check_path
from mstar_core.transport.arena import Arena, ArenaShape

GREETING = struct.Struct("<QQ")  # size_bytes, slots
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid (unix(7), SO_PEERCRED)
_SEND_TIMEOUT_S = 1.0
_RETRY_S = 0.1


class FdServer:
    """Listens at `path` (mode 0600); each connection gets one greeting with the descriptor, and is closed."""

    def __init__(self, path: Path, arena: Arena) -> None:
        """Raises TransportError when the socket cannot be made."""
        self.path = path
        self.served = 0
        self.refused = 0
        self._fd = arena.reader_fd
        self._greeting = GREETING.pack(arena.shape.size_bytes, arena.shape.slots)
        check_path(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            os.fchmod(self._socket.fileno(), 0o600)  # before bind: the file never has another mode
            self._socket.bind(os.fspath(path))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise TransportError("shared memory cannot be offered", f"{path}: {error}") from error
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="mstar-arena-fd", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and remove the socket file. Safe to call twice."""
        if self._socket.fileno() == -1:
            return
        self._closing.set()
        self._socket.shutdown(socket.SHUT_RDWR)  # ends the accept of the thread
        self._thread.join()
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closing, or out of descriptors: then the reader waits until some are free again
                self._closing.wait(_RETRY_S)
                continue
            with connection:
                self._greet(connection)

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_SEND_TIMEOUT_S)
            _, uid, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid != os.geteuid():
                self.refused += 1
                return
            socket.send_fds(connection, [self._greeting], [self._fd])
            self.served += 1
        except OSError:  # isolation boundary: one reader, which sees its connection closed
            self.refused += 1


def fetch(path: Path, timeout_s: float) -> tuple[int, ArenaShape]:
    """Ask the server at `path` for its arena. Returns a descriptor that the caller closes, and the arena's shape.

    Raises OSError (TimeoutError included) when nobody answers.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        connection.connect(os.fspath(path))
        greeting, fds, _, _ = socket.recv_fds(connection, GREETING.size, 1)
    if len(greeting) != GREETING.size or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise ConnectionResetError(f"{path} did not hand over its shared memory")
    size_bytes, slots = GREETING.unpack(greeting)
    return fds[0], ArenaShape(size_bytes=size_bytes, slots=slots)
