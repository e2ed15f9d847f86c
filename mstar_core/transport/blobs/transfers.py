"""Transfers of tensors from one owner of another host. Used by the thread of `BlobClient` alone.

All tensors of an owner come by one connection. They take turns at its pieces, so that a large one delays no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import zmq

from mstar_core.errors import TransportError
from mstar_core.messages.tensors import ShmTensor
from mstar_core.transport.arena import COUNTER_BITS
from mstar_core.transport.blobs.pieces import PIECE_BYTES, WINDOW, Piece, unpack
from mstar_core.transport.curve import connect_curve
from mstar_core.transport.dtypes import Array, check_size, storage
from mstar_core.transport.remote import CurveKeys

REDIAL_S: Final = 3.0
"""Silence after which the connection is made anew and all pieces are requested again."""

SILENCE_S: Final = 10.0
"""Silence after which the tensors of an owner fail, the limit of the supervisor for heartbeats."""

_DISCARD: Final = memoryview(bytearray())

Ended = Callable[[int, "Array | TransportError"], None]
"""Takes the number of a transfer that has ended, and its outcome."""


class OwnerAddress(NamedTuple):
    """Process of another host. endpoint: of its blob server."""

    name: str
    endpoint: str
    incarnation: int


class Transfer:
    """A tensor on the way into `array`. missing: its bytes that have not come."""

    def __init__(self, number: int, ref: ShmTensor) -> None:
        """Raises TransportError for a handle that contradicts itself or a tensor without room."""
        check_size(ref.dtype, ref.shape, ref.size_bytes)
        if min(ref.offset, ref.slot) < 0 or ref.slot >= 1 << 32 or ref.offset + ref.size_bytes >= 1 << 63:
            raise TransportError("a tensor handle points outside its owner's memory", str(ref), peer=ref.owner)
        self.number = number
        self._ref = ref
        try:
            self.array: Array = np.empty(ref.shape, storage(ref.dtype))
        except (MemoryError, ValueError) as error:  # ValueError: more than an address space
            raise TransportError(
                "no memory for a tensor of another host", f"{ref.size_bytes} bytes", peer=ref.owner
            ) from error
        self._bytes = self.array.reshape(-1).view(np.uint8).data if ref.size_bytes else _DISCARD
        self.missing = max(ref.size_bytes, 1)  # an empty tensor is one piece, whose answer confirms the loan
        self._next = 0
        self._requested: dict[int, int] = {}  # sizes by offset in the tensor

    @property
    def has_more(self) -> bool:
        """Whether pieces have not been requested."""
        return self._next < max(self._ref.size_bytes, 1)

    def next_piece(self) -> Piece:
        """Return the next piece to request."""
        begin = self._next
        size = min(PIECE_BYTES, self._ref.size_bytes - begin)
        self._next += max(size, 1)
        self._requested[begin] = size
        return self._piece(begin, size)

    def requested(self) -> list[Piece]:
        """Return the pieces that were requested and have not come."""
        return [self._piece(begin, size) for begin, size in self._requested.items()]

    def expect(self, piece: Piece) -> memoryview | None:
        """Return the place of a piece, None if it was not requested or has come already."""
        size = self._requested.pop(piece.offset - self._ref.offset, None)
        if size is None:
            return None
        self.missing -= max(size, 1)
        begin = piece.offset - self._ref.offset
        return self._bytes[begin : begin + size]

    def _piece(self, begin: int, size: int) -> Piece:
        return Piece(self.number, self._ref.generation, self._ref.offset + begin, size, self._ref.slot)


class Transfers:
    """The transfers from one owner and the connection to it. silent_s: time without a piece while some are missing."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys, owner: OwnerAddress, ended: Ended
    ) -> None:
        """Connect. ended: called once for each transfer that was started and not cancelled.

        Raises TransportError for an endpoint that ZMQ rejects.
        """
        self.owner = owner
        self._context = context
        self._keys = keys
        self._ended = ended
        self._transfers: dict[int, Transfer] = {}
        self._queue: deque[Transfer] = deque()
        self._again: deque[Piece] = deque()
        self._on_the_way = 0
        self._silent_s = 0.0
        self._redial_at_s = REDIAL_S
        self.socket = self._dial()

    @property
    def is_busy(self) -> bool:
        return bool(self._transfers)

    def start(self, number: int, ref: ShmTensor) -> None:
        """Begin to fetch a tensor."""
        try:
            if ref.generation >> COUNTER_BITS != self.owner.incarnation:
                raise self._error("the loan of a tensor ended before it was read", "its owner was started again")
            transfer = Transfer(number, ref)
        except TransportError as error:
            self._ended(number, error)
            return
        if not self._transfers:
            self._heard()
        self._transfers[number] = transfer
        self._queue.append(transfer)
        self._request()

    def cancel(self, number: int) -> None:
        """Forget a transfer. Its pieces on the way are discarded."""
        transfer = self._transfers.pop(number, None)
        if transfer is not None and transfer.has_more:
            self._queue.remove(transfer)

    def receive(self) -> None:
        """Take the pieces that have come, at most a window of them."""
        for _ in range(WINDOW):
            try:
                piece = unpack(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            self._on_the_way -= 1
            self._take(piece)
        self._request()

    def passed(self, seconds: float) -> bool:
        """Count time of silence. Returns whether the socket was replaced."""
        self._silent_s = self._silent_s + seconds if self._transfers else 0.0
        if self._silent_s >= SILENCE_S:
            self.fail("a tensor of another host does not arrive", f"silent for {SILENCE_S:g} s")
            return self._redial()  # the pieces on the way may still come
        if self._silent_s >= self._redial_at_s:
            self._redial_at_s += REDIAL_S
            return self._redial()
        return False

    def fail(self, title: str, detail: str) -> None:
        """End all transfers with an error."""
        failed = list(self._transfers)
        self._transfers.clear()
        self._queue.clear()
        self._again.clear()
        for number in failed:
            self._ended(number, self._error(title, detail))

    def close(self) -> None:
        """Drop the connection."""
        self.socket.close(0)

    def _dial(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            connect_curve(socket, self.owner.endpoint, self._keys, self._keys.public)
        except zmq.ZMQError as error:
            socket.close(0)
            raise self._error("the shared memory of a peer cannot be reached", str(error)) from error
        return socket

    def _redial(self) -> bool:
        """Replace the connection, which also drops late answers, and request what has not come."""
        try:
            socket = self._dial()
        except TransportError as error:
            self.fail(error.title, error.detail or "")
            return False
        self.socket.close(0)
        self.socket = socket
        self._on_the_way = 0
        self._again = deque(piece for each in self._transfers.values() for piece in each.requested())
        self._request()
        return True

    def _request(self) -> None:
        while self._on_the_way < WINDOW:
            if self._again:
                piece = self._again.popleft()
            elif self._queue:
                transfer = self._queue.popleft()
                piece = transfer.next_piece()
                if transfer.has_more:
                    self._queue.append(transfer)
            else:
                return
            self.socket.send(piece.pack(), zmq.NOBLOCK)
            self._on_the_way += 1

    def _take(self, piece: Piece | None) -> None:
        transfer = self._transfers.get(piece.number) if piece is not None else None
        place = transfer.expect(piece) if transfer is not None and piece is not None else None
        size = self.socket.recv_into(_DISCARD if place is None else place) if self._follows() else -1
        reason = b"".join(self.socket.recv_multipart()) if self._follows() else b""
        if transfer is None or place is None:
            return
        self._heard()
        if reason or size != len(place):
            self.cancel(transfer.number)
            self._ended(
                transfer.number, self._error(reason.decode(errors="replace") or "a piece of a tensor is torn", "")
            )
        elif not transfer.missing:
            del self._transfers[transfer.number]
            self._ended(transfer.number, transfer.array)

    def _follows(self) -> bool:
        return bool(self.socket.getsockopt(zmq.RCVMORE))

    def _heard(self) -> None:
        self._silent_s = 0.0
        self._redial_at_s = REDIAL_S

    def _error(self, title: str, detail: str) -> TransportError:
        where = f"{self.owner.name} at {self.owner.endpoint}"
        return TransportError(title, f"{where}: {detail}" if detail else where, peer=self.owner.name)
