"""Connections that the supervisor keeps for the next api. Made by the listener; owned by the api process."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Final

from mstar_core.api.handover.recording import ConnectionRecording
from mstar_core.errors import TransportError
from mstar_core.transport.fd_store import FdStoreClient, Kept

LINGER: Final = struct.Struct("ii")
RESET: Final = LINGER.pack(1, 0)
"""SO_LINGER with timeout 0: closing sends a reset and frees the send buffer."""

MOST_ADOPTIONS: Final = 3
"""Processes that continue one request. A request that met more deaths may be their cause."""

log = logging.getLogger("mstar.api.handover")


class KeptConnection:
    """One connection of which the supervisor has a copy. recording: what the next api needs to continue it."""

    def __init__(self, sock: socket.socket, recording: ConnectionRecording, drop: Callable[[], None]) -> None:
        self.recording = recording
        self._socket = sock
        self._drop = drop

    def release(self) -> None:
        """Give up the copy: the connection ends with this process. Safe to call twice."""
        if not self.recording.is_closed:
            self.recording.close()
            self._drop()

    def end(self) -> None:
        """Give up the copy of a connection that is being closed, which its client sees at once. Safe to call twice."""
        if self.recording.is_closed:
            return
        try:
            is_reset, _ = LINGER.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER.size))
            if not is_reset:  # otherwise closing the last copy sends the reset
                self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client has closed it
        self.release()


class Keeper:
    """Leaves connections with the supervisor, and takes those that an earlier api left."""

    def __init__(self, store: FdStoreClient) -> None:
        self._store = store
        self._next: tuple[ConnectionRecording, int] | None = None

    def prepare(self) -> None:
        """Make the recording of the next connection, so that `keep` takes no time after an accept()."""
        if self._next is not None:
            return
        try:
            self._next = ConnectionRecording.create()
        except OSError as error:
            log.warning("a connection cannot be recorded and will end with this process: %s", error)

    def keep(self, sock: socket.socket) -> KeptConnection | None:
        """Leave a copy of a new connection and record it; None, after a log entry, if that is not possible.

        Call it at once after the accept(): until then the connection would end with this process.
        """
        self.prepare()
        if self._next is None:
            return None
        (recording, memory), self._next = self._next, None
        try:
            key = self._store.keep(sock.fileno(), memory)
        finally:
            os.close(memory)
        kept = KeptConnection(sock, recording, lambda: self._store.drop(key))
        try:
            recording.follow(sock)
        except OSError as error:
            log.warning("a connection cannot be recorded and will end with this process: %s", error)
            kept.release()
            return None
        return kept

    async def take(self) -> list[tuple[socket.socket, KeptConnection]]:
        """Return the connections that an earlier api left. Those that cannot go on are closed."""
        taken = []
        for kept in await self._store.take():
            pair = self._adopted(kept)
            if pair is not None:
                taken.append(pair)
        return taken

    def _adopted(self, kept: Kept) -> tuple[socket.socket, KeptConnection] | None:
        try:
            sock = socket.socket(fileno=kept.connection)
            recording = ConnectionRecording.adopt(kept.memory)
        except (OSError, TransportError) as error:
            log.error("a connection of the last process cannot go on: %s", error)
            self._store.drop(kept.key)
            return None
        finally:
            os.close(kept.memory)
        return sock, KeptConnection(sock, recording, lambda: self._store.drop(kept.key))

    def close(self) -> None:
        """Close the socket to the supervisor; what was left stays there. Safe to call twice."""
        if self._next is not None:
            recording, memory = self._next
            self._next = None
            recording.close()
            os.close(memory)
        self._store.close()
