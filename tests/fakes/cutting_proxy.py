"""TCP proxy that cuts connections in the middle of responses, as a bad network does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

PIECE: Final = 4096


class CuttingProxy:
    """Forwards to a port. The n-th connection is cut after `cuts[n]` bytes of its responses, later ones never.

    opened: connections so far.
    """

    def __init__(self, port: int, cuts: Sequence[int]) -> None:
        self.opened = 0
        self._port = port
        self._cuts = list(cuts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            limit = self._cuts[self.opened] if self.opened < len(self._cuts) else None
            self.opened += 1
            server = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += (client, server)
            for source, sink, most in ((client, server, None), (server, client, limit)):
                thread = threading.Thread(target=_forward, args=(source, sink, most), daemon=True)
                self._threads.append(thread)
                thread.start()


def _forward(source: socket.socket, sink: socket.socket, most: int | None) -> None:
    """Copy bytes until either end closes, or `most` were copied; then shut both down."""
    try:
        while most is None or most > 0:
            data = source.recv(PIECE if most is None else min(PIECE, most))
            if not data:
                break
            sink.sendall(data)
            most = None if most is None else most - len(data)
    except OSError:
        pass  # the other direction has closed them
    for each in (source, sink):
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer has closed it
