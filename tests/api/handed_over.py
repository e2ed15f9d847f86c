"""Responses that another process goes on with: every moment at which the first one may die, and what its client reads.

The first connection runs to its end and notes, at each write to its socket, the recording and the bytes that the
client has. `go_on` then continues from a moment on a second connection, as a new api does.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mstar_core.api.handover.keeper import RESET, KeptConnection
from mstar_core.api.handover.recording import ConnectionRecording
from mstar_core.api.http.connection import Connection
from tests.api.conftest import Api


@dataclass(frozen=True, slots=True)
class Moment:
    """A death between the recording and the sending of some bytes. memory: a copy of the file of the recording.

    written: what the first process had sent. following: what it was about to send.
    """

    memory: int
    written: bytes
    following: bytes

    @property
    def client_has(self) -> Iterator[bytes]:
        """Yield what the client may have: nothing of the last bytes, a part of them, or all."""
        yield self.written
        if len(self.following) > 1:
            yield self.written + self.following[: len(self.following) // 2]
        yield self.written + self.following


class Options:
    """Options of the socket of a `Wire`."""

    def __init__(self) -> None:
        self.set: list[tuple[int, int, bytes]] = []

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        self.set.append((level, option, value))


class Wire(asyncio.Transport):
    """A socket that accepts everything. memory: descriptor of the recording, copied before each write.

    connection: which uses it. is_over: the process has closed it. is_left: the test has.
    """

    def __init__(self, memory: int | None = None) -> None:
        super().__init__()
        self.written = b""
        self.moments: list[Moment] = []
        self.is_over = self.is_left = False
        self.options = Options()
        self._memory = memory
        self.connection: Any = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._memory is not None:
            self.moments.append(Moment(copied(self._memory), self.written, bytes(data)))
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.connection = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self.connection
        return protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.options if name == "socket" else default

    @property
    def is_reset(self) -> bool:
        """Whether the client sees an error at the end, and not an end."""
        return (socket.SOL_SOCKET, socket.SO_LINGER, RESET) in self.options.set

    def is_closing(self) -> bool:
        return self.is_over or self.is_left

    def close(self) -> None:
        self.is_over = True

    def abort(self) -> None:
        self.is_over = True


def copied(memory: int) -> int:
    """Return a copy of a memory file, without its holes."""
    copy, size, at = os.memfd_create("copy"), os.fstat(memory).st_size, 0
    os.ftruncate(copy, size)
    while at < size:
        try:
            begin = os.lseek(memory, at, os.SEEK_DATA)
        except OSError:  # no further data
            break
        at = os.lseek(memory, begin, os.SEEK_HOLE)
        os.pwrite(copy, os.pread(memory, at - begin, begin), begin)
    return copy


@contextmanager
def connected(api: Api, recording: ConnectionRecording, wire: Wire) -> Iterator[Connection]:
    """Serve a connection during the block, and end its handler."""
    listener: Any = api.process._listener
    with socket.socket() as unused:
        kept = KeptConnection(unused, recording, lambda: None)
        connection = Connection(api.process._app, listener.connections, listener._state, kept)  # type: ignore[arg-type]
        wire.set_protocol(connection)
        connection.connection_made(wire)
        try:
            yield connection
        finally:
            wire.is_left = True
            connection.connection_lost(None)


@contextmanager
def first_process(api: Api, request: bytes) -> Iterator[Wire]:
    """Send a request to the first process, whose moments the wire keeps."""
    recording, memory = ConnectionRecording.create()
    wire = Wire(memory)
    try:
        with connected(api, recording, wire) as connection:
            connection.data_received(request)
            yield wire
    finally:
        os.close(memory)
        for moment in wire.moments:
            os.close(moment.memory)


@dataclass(slots=True)
class Continued:
    """A response in the second process. before: what the client has from the first one."""

    connection: Connection
    wire: Wire
    before: bytes

    @property
    def received(self) -> bytes:
        """Return everything that the client has."""
        return self.before + self.wire.written

    @property
    def is_behind(self) -> bool:
        """Return whether the second process has not produced yet what the client has."""
        transport: Any = self.connection.transport
        return bool(transport.is_muted)


@contextmanager
def second_process(api: Api, moment: Moment, client_has: bytes, *, is_late: bool = False) -> Iterator[Continued]:
    """Go on from a moment. is_late: the deadline of the request has passed meanwhile."""
    memory = copied(moment.memory)
    recording, wire = ConnectionRecording.adopt(memory), Wire()
    os.close(memory)
    if is_late:
        recording.record.started = -1e9
    rest = recording.response(len(client_has))
    assert rest is not None, "the recording has what the client lacks"
    with connected(api, recording, wire) as connection:
        connection.go_on(rest)
        yield Continued(connection, wire, client_has)
