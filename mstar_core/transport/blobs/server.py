"""Blob server: lends the tensors of a process's arena to processes of other hosts. Owned by `TensorTransport`.

It reads the arena as readers of the same host do, by a mapping of its own and by slot and generation, so it shares no
state with the main loop. Its ZMQ context is its own too: encryption of tensors delays no message.
"""

from __future__ import annotations

import logging
import mmap
import threading

import numpy as np
import zmq

from mstar_core.closing import Closing
from mstar_core.transport.arena import Arena
from mstar_core.transport.blobs.pieces import PIECE_BYTES, WINDOW, Piece, unpack
from mstar_core.transport.curve import serve_curve
from mstar_core.transport.remote import RemoteAccess, bind_remote
from mstar_core.transport.zap import Authenticator

log = logging.getLogger(__name__)

ENDED = b"the loan of a tensor ended before it was read"
OUTSIDE = b"a tensor handle points outside its owner's memory"
FAILED = b"a tensor could not be read by its owner"


class BlobServer(Closing):
    """Answers requests for pieces on a thread. endpoint: of its socket, `tcp://ADDRESS:PORT`."""

    def __init__(self, arena: Arena, access: RemoteAccess) -> None:
        """Start serving. Raises TransportError without a free port."""
        self._memory = mmap.mmap(arena.reader_fd, arena.size_bytes, prot=mmap.PROT_READ)
        self._table = np.frombuffer(self._memory, dtype=np.uint64, count=arena.slots)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = Authenticator(self._context, access.accepted_key)
        self._socket = self._open_socket(access)
        try:
            self.endpoint = bind_remote(self._socket, access)
        except BaseException:
            self._socket.close(0)
            self._context.term()
            raise
        self._thread = threading.Thread(target=self._serve, name="mstar-blobs", daemon=True)
        self._thread.start()

    def _open_socket(self, access: RemoteAccess) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        # A reader has at most this many pieces on the way. Answers beyond are dropped; it requests them again.
        socket.setsockopt(zmq.SNDHWM, 4 * WINDOW)
        serve_curve(socket, access.keys)
        return socket

    def close(self) -> None:
        """Stop serving. Pieces that were not sent are dropped. Safe to call twice."""
        self._context.term()  # ends the wait of both threads, which close their sockets
        self._thread.join()
        self._authenticator.close()

    def _serve(self) -> None:
        try:
            while True:
                reader, *request = self._socket.recv_multipart()
                piece = unpack(request[0]) if len(request) == 1 else None
                if piece is not None:
                    self._answer(reader, request[0], piece)
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(0)

    def _answer(self, reader: bytes, request: bytes, piece: Piece) -> None:
        try:
            self._send(reader, request, piece)
        except zmq.ContextTerminated:
            raise
        except Exception:  # isolation boundary: one request
            log.exception("a piece of a tensor was not sent")
            self._socket.send_multipart([reader, request, b"", FAILED])

    def _send(self, reader: bytes, request: bytes, piece: Piece) -> None:
        end = piece.offset + piece.size_bytes
        if piece.slot >= len(self._table) or not self._table.nbytes <= piece.offset <= end <= len(self._memory):
            self._socket.send_multipart([reader, request, b"", OUTSIDE])
            return
        if piece.size_bytes > PIECE_BYTES:
            self._socket.send_multipart([reader, request, b"", b"a piece is too large"])
            return
        frame: zmq.Frame | None = None
        if self._is_lent(piece):
            # ZMQ encrypts later, when the loan may have ended. Only a copy can be checked before it is sent.
            frame = zmq.Frame(memoryview(self._memory)[piece.offset : end], copy=True)
        if frame is None or not self._is_lent(piece):
            self._socket.send_multipart([reader, request, b"", ENDED])
            return
        self._socket.send_multipart([reader, request, frame], copy=False)

    def _is_lent(self, piece: Piece) -> bool:
        return int(self._table[piece.slot]) == piece.generation
