"""Listening socket of a deployment. Owned by the supervisor, so that it outlives the api, which inherits it.

Connections that arrive while no api runs wait in its backlog. A supervisor can hand the socket to another one.
"""

from __future__ import annotations

import os
import socket
from typing import Final, Self

from mstar_core.errors import TransportError
from mstar_core.host.ports import bind_port

GREETING: Final = b"listener"


class PortListener:
    """The port of a deployment. Nothing is refused from the first `listen` of an api until `close`."""

    def __init__(self, host: str, port: int, sock: socket.socket | None = None) -> None:
        """sock: the socket of another supervisor, which is bound to the same port."""
        self._host = host
        self._port = port
        self._socket = sock

    def open(self) -> int:
        """Bind the port unless it is bound. Returns the descriptor for an api. Raises StartError if it is in use."""
        if self._socket is None:
            self._socket = bind_port(self._host, self._port)
        return self._socket.fileno()

    def close(self) -> None:
        """Stop listening: later connections are refused. `open` binds the port again. Safe to call twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def send(self, peer: socket.socket) -> None:
        """Hand the open socket to the process at the other end of a Unix socket; both hold it then.

        Raises TransportError if the peer does not take it.
        """
        try:
            socket.send_fds(peer, [GREETING], [self.open()])
        except OSError as error:
            raise TransportError("the listening socket cannot be handed over", str(error)) from error

    @classmethod
    def receive(cls, peer: socket.socket) -> Self:
        """Take the socket that another supervisor sends. Raises TransportError if it sends something else."""
        try:
            greeting, fds, _, _ = socket.recv_fds(peer, len(GREETING), 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise TransportError("the listening socket was not handed over", str(error)) from error
        if greeting != GREETING or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise TransportError("the listening socket was not handed over", "the other end sent something else")
        sock = socket.socket(fileno=fds[0])
        host, port = sock.getsockname()[:2]
        return cls(host, port, sock)
