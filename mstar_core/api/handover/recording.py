"""Recording of one connection in a memory file: the request in progress, and the response bytes not yet accepted.

Written by the api before each write to the socket, read by the next api. A response is recorded in whole parts: the
bytes of a part and what the response holds behind it become valid together. The file has no name and belongs to the
two processes that hold it. Layout: number of the valid record, two records, request bytes, response bytes, drawn ids.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import termios
from collections.abc import Mapping, Sequence
from typing import Final, Self

import msgspec

from mstar_core.errors import TransportError

KIB, MIB = 1 << 10, 1 << 20
VALID: Final = struct.Struct("=Q")
LENGTH: Final = struct.Struct("=I")
RECORD_BYTES: Final = 32 * KIB
REQUEST_BYTES: Final = 16 * MIB
"""Longest request, head and body, that can be continued."""

RESPONSE_BYTES: Final = 16 * MIB
"""Most bytes of a response that the client has not read and that can be continued."""

DRAWN_BYTES: Final = 4 * MIB
"""Most bytes of drawn ids of a request that can be continued."""

_RECORDS: Final = mmap.PAGESIZE
_REQUEST: Final = _RECORDS + 2 * RECORD_BYTES
_RESPONSE: Final = _REQUEST + REQUEST_BYTES
_DRAWN: Final = _RESPONSE + RESPONSE_BYTES
_SIZE: Final = _DRAWN + DRAWN_BYTES
KEPT_PAGES_BYTES: Final = 64 * KIB
"""Memory that an idle connection keeps; more is returned to the system."""

WRITTEN_BYTES: Final = 32 * KIB
"""Received bytes from this size on are written by a call of the kernel."""

_ACKED_AT: Final = 120
"""Offset of `tcpi_bytes_acked` in `struct tcp_info` (linux/tcp.h)."""

Units = Mapping[str, int]
Data = bytes | bytearray | memoryview


class Record(msgspec.Struct, array_like=True):
    """State of a connection. Positions count the response bytes of the connection from its beginning.

    base: bytes that the kernel had counted before; known once `total` is not 0. total: recorded so far, always at the
    end of a part. origin: position of the first byte in the response area, -1 if some bytes did not fit.
    request_bytes: in the request area, -1 if they did not fit. is_active: a request is being handled, with this id,
    trace id, start (monotonic) and time of creation; its response begins at `start`. has_continue: the interim
    response was sent before it. events_type: content type of a response of events. units: what the response holds, by
    port, of each item of the request; lines: number of its parts that hold no output and come before the first one;
    events: number of its events. is_closing: the connection ends after these bytes. adoptions: number of processes
    that continued the request. firsts: monotonic times of the first output and the first sound of a request with one
    item, 0.0 before them.
    """

    base: int = 0
    total: int = 0
    origin: int = 0
    request_bytes: int = 0
    is_active: bool = False
    is_closing: bool = False
    adoptions: int = 0
    request_id: str = ""
    trace_id: str = ""
    started: float = 0.0
    created: float = 0.0
    start: int = 0
    has_continue: bool = False
    events_type: str = ""
    units: list[Units] = []
    lines: int = 0
    events: int = 0
    firsts: tuple[float, float] = (0.0, 0.0)


_decoder = msgspec.msgpack.Decoder(Record)
_encoder = msgspec.msgpack.Encoder()


class ConnectionRecording:
    """The memory file of a connection. Owned by it; written by the transport and by the request in progress."""

    def __init__(self, fd: int, record: Record) -> None:
        """fd: of the memory file; the caller closes it. Raises OSError if it cannot be mapped."""
        self.record = record
        self._memory = mmap.mmap(fd, _SIZE)
        self._file = os.dup(fd)
        self._valid = 0
        self._ending: tuple[int, bool] | None = None
        self._held: tuple[list[Units], int, int] | None = None
        self._is_interim = False
        self._part: tuple[int, int | None] = (0, None)
        self._response_end = 0
        self._drawn_end = 0

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """Return an empty recording and its descriptor, which the caller closes. Raises OSError."""
        fd = os.memfd_create("mstar-connection", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _SIZE)
            recording = cls(fd, Record())
            recording._commit()
        except BaseException:
            os.close(fd)
            raise
        return recording, fd

    @classmethod
    def adopt(cls, fd: int) -> Self:
        """Return the recording of another process. Raises OSError, and TransportError if it is not valid."""
        if os.fstat(fd).st_size != _SIZE:
            raise TransportError("a recording has the wrong size")
        recording = cls(fd, Record())
        recording._load()
        recording._response_end = RESPONSE_BYTES  # unknown
        recording._drawn_end = sum(LENGTH.size + len(entry) for entry in recording.drawn())
        recording.record.adoptions += 1
        recording._commit()
        return recording

    def follow(self, sock: socket.socket) -> None:
        """Note the connection, to which nothing has been written yet. Raises OSError."""
        self.record.base = counted_bytes(sock)
        self._commit()

    def close(self) -> None:
        """Unmap the memory. Safe to call twice."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self._file)

    @property
    def is_closed(self) -> bool:
        """Whether the memory was unmapped; nothing is recorded then."""
        return self._memory.closed

    # request

    def received(self, data: Data) -> None:
        """Append bytes of the request."""
        record, size = self.record, len(data)
        if self._memory.closed or record.request_bytes < 0 or not size:
            return
        end = record.request_bytes + size
        if end > REQUEST_BYTES:
            record.request_bytes = -1
        else:
            record.request_bytes = end if self._has_written(data, _REQUEST + record.request_bytes) else -1
        self._commit()

    def _has_written(self, data: Data, at: int) -> bool:
        """Write bytes of the request. Returns False without memory for them: the request cannot be continued.

        A call of the kernel fills new pages in half the time of faults on the map.
        """
        if len(data) < WRITTEN_BYTES:
            self._memory[at : at + len(data)] = data
            return True
        left = memoryview(data)
        try:
            while left:
                done = os.pwrite(self._file, left, at)
                at, left = at + done, left[done:]
        except OSError:
            return False
        return True

    def await_request(self, unread: int) -> None:
        """Note that no request is in progress. unread: received bytes that belong to the next one."""
        if self._memory.closed or not (self.record.is_active or self.record.request_bytes != unread):
            return
        self._end_request(unread)
        self._commit()

    def begin(self, request_id: str, trace_id: str, started: float, created: float) -> None:
        """Note that a request is being handled. started: monotonic time; created: seconds since the epoch."""
        record = self.record
        if self._memory.closed:
            return
        record.is_active, record.request_id, record.trace_id = True, request_id, trace_id
        record.started, record.created = started, created
        record.start, record.has_continue, record.events_type = record.total, False, ""
        record.units, record.lines, record.events, record.firsts = [], 0, 0, (0.0, 0.0)
        self._held = None
        self._forget_drawn()
        self._commit()

    def draw(self, entry: bytes) -> None:
        """Append an entry of drawn ids. Those that do not fit make the request one that cannot be continued."""
        if self._memory.closed or not self.record.is_active:
            return
        end = self._drawn_end + LENGTH.size + len(entry)
        if end + LENGTH.size > DRAWN_BYTES:
            self.record.request_bytes = -1
            self._commit()
            return
        at = _DRAWN + self._drawn_end
        self._memory[at + LENGTH.size : at + LENGTH.size + len(entry)] = entry
        LENGTH.pack_into(self._memory, _DRAWN + end, 0)
        LENGTH.pack_into(self._memory, at, len(entry))  # last, because it makes the entry valid
        self._drawn_end = end

    def drawn(self) -> list[bytes]:
        """Return the entries of drawn ids of the request in progress, none once the memory is unmapped."""
        entries: list[bytes] = []
        if self._memory.closed:
            return entries
        at = _DRAWN
        while size := LENGTH.unpack_from(self._memory, at)[0]:
            entries.append(self._memory[at + LENGTH.size : at + LENGTH.size + size])
            at += LENGTH.size + size
        return entries

    def _forget_drawn(self) -> None:
        LENGTH.pack_into(self._memory, _DRAWN, 0)
        if self._drawn_end > KEPT_PAGES_BYTES:
            self._memory.madvise(mmap.MADV_REMOVE, _DRAWN + KEPT_PAGES_BYTES, DRAWN_BYTES - KEPT_PAGES_BYTES)
        self._drawn_end = 0

    def request(self) -> bytes:
        """Return the bytes of the request in progress."""
        return self._memory[_REQUEST : _REQUEST + max(0, self.record.request_bytes)]

    # response

    def holds(self, units: list[Units], lines: int, events: int) -> None:
        """Note what the response holds behind the part that is recorded next."""
        self._held = units, lines, events

    def continues(self) -> None:
        """Note that the next write is the interim response, which belongs to no part."""
        self._is_interim = True

    def ends(self, unread: int, *, is_closing: bool = False) -> None:
        """Note that the part that is recorded next ends the response, unless its end was recorded.

        unread: received bytes that belong to the next request. is_closing: the connection ends with it.
        """
        if self.record.is_active:
            self._ending = unread, is_closing

    def sent(self, parts: Sequence[Data], unaccepted: int) -> None:
        """Record a part before it is written to the socket. unaccepted: earlier bytes that the kernel did not take."""
        self.prepare(sum(map(len, parts)), unaccepted)
        for part in parts:
            self.fill(part)
        self.complete()

    def prepare(self, size: int, unaccepted: int) -> None:
        """Begin to record a part of so many bytes, which counts once it is complete. unaccepted: as for `sent`."""
        if not self._memory.closed:
            self._part = size, self._room(size, unaccepted)

    def fill(self, data: Data) -> None:
        """Append bytes of the part."""
        size, offset = self._part
        if offset is None or self._memory.closed:
            return
        end = offset + len(data)
        self._memory[_RESPONSE + offset : _RESPONSE + end] = data
        self._part, self._response_end = (size, end), max(self._response_end, end)

    def complete(self) -> None:
        """Let the part count."""
        record = self.record
        if self._memory.closed:
            return
        (size, _), self._part = self._part, (0, None)
        record.total += size
        if self._held is not None:
            (record.units, record.lines, record.events), self._held = self._held, None
        if self._is_interim:
            self._is_interim, record.start, record.has_continue = False, record.total, True
        if self._ending is not None:
            (unread, is_closing), self._ending = self._ending, None
            record.is_closing = record.is_closing or is_closing
            self._end_request(unread)
        self._commit()

    def closes(self) -> None:
        """Note that the connection ends when everything that was recorded has been sent."""
        if not self._memory.closed and not self.record.is_closing:
            self.record.is_closing = True
            self._commit()

    def unsent(self, sock: socket.socket) -> bytes | None:
        """Return the recorded bytes that the kernel has not accepted from an earlier process, None if some are missing.

        Raises OSError.
        """
        if not self.record.total:
            self.follow(sock)
            return b""
        return self.response(counted_bytes(sock) - self.record.base)

    def response(self, position: int) -> bytes | None:
        """Return the recorded bytes from a position on, None if some of them did not fit."""
        record = self.record
        if position == record.total:
            return b""
        if record.origin < 0 or not record.origin <= position < record.total:
            return None
        return self._memory[_RESPONSE + position - record.origin : _RESPONSE + record.total - record.origin]

    def _room(self, size: int, unaccepted: int) -> int | None:
        """Return the offset for `size` bytes, None if they do not fit. Then nothing fits until all are accepted."""
        record = self.record
        if not unaccepted:
            record.origin = record.total  # everything before is with the kernel
        if record.origin < 0:
            return None
        if record.total + size - record.origin > RESPONSE_BYTES:
            if unaccepted + size > RESPONSE_BYTES:
                record.origin = -1
                return None
            end = _RESPONSE + record.total - record.origin
            kept = self._memory[end - unaccepted : end]
            # The bytes are recorded at a new place only after this one is invalid, so that a death in between is seen.
            origin, record.origin = record.total - unaccepted, -1
            self._commit()
            self._memory[_RESPONSE : _RESPONSE + unaccepted] = kept
            record.origin = origin
        return record.total - record.origin

    def _end_request(self, unread: int) -> None:
        record, used = self.record, self.record.request_bytes
        self._ending = self._held = None
        record.is_active, record.units, record.adoptions = False, [], 0
        if used < 0:
            record.request_bytes = -1 if unread else 0
        elif unread:
            self._memory[_REQUEST : _REQUEST + unread] = self._memory[_REQUEST + used - unread : _REQUEST + used]
            record.request_bytes = unread
        else:
            record.request_bytes = 0
        if used < 0 or used > KEPT_PAGES_BYTES:
            self._memory.madvise(mmap.MADV_REMOVE, _REQUEST + KEPT_PAGES_BYTES, REQUEST_BYTES - KEPT_PAGES_BYTES)
        end = record.total - record.origin if record.origin >= 0 else 0
        kept = max(KEPT_PAGES_BYTES, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
        if self._response_end > kept:
            self._memory.madvise(mmap.MADV_REMOVE, _RESPONSE + kept, RESPONSE_BYTES - kept)
            self._response_end = kept

    def _commit(self) -> None:
        """Write the record beside the valid one, then make it the valid one."""
        data = _encoder.encode(self.record)
        if len(data) > RECORD_BYTES - LENGTH.size:
            self.record.request_bytes = -1  # such a request cannot be continued
            self.record.units = []
            data = _encoder.encode(self.record)
        number = 1 - self._valid
        at = _RECORDS + number * RECORD_BYTES
        self._memory[at : at + LENGTH.size + len(data)] = LENGTH.pack(len(data)) + data
        VALID.pack_into(self._memory, 0, number)
        self._valid = number

    def _load(self) -> None:
        (self._valid,) = VALID.unpack_from(self._memory, 0)
        at = _RECORDS + self._valid * RECORD_BYTES
        (size,) = LENGTH.unpack_from(self._memory, at) if self._valid in (0, 1) else (0,)
        try:
            self.record = _decoder.decode(self._memory[at + LENGTH.size : at + LENGTH.size + size])
        except msgspec.MsgspecError as error:
            raise TransportError("a recording cannot be read", str(error)) from error


def counted_bytes(sock: socket.socket) -> int:
    """Return the bytes of a TCP connection that the kernel has accepted so far, up to a constant of the connection.

    They are the acknowledged ones and those in its send queue. Raises OSError.
    """
    while True:
        before = _acknowledged(sock)
        queued = int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])  # SIOCOUTQ
        if _acknowledged(sock) == before:  # otherwise a part may have been counted twice
            return before + queued


def _acknowledged(sock: socket.socket) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + 8)
    return int(struct.unpack_from("=Q", info, _ACKED_AT)[0])
