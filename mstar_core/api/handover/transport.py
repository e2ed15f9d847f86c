"""Transport of a connection that records what is written before the socket gets it. Made by the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final

from mstar_core.api.handover.recording import ConnectionRecording, Data

LARGE_BYTES: Final = 1 << 20
"""Pieces of at least this size are recorded in a turn of the event loop each."""


class RecordedTransport(asyncio.Transport):
    """A transport whose writes are recorded, each as a part of its own unless `record` has announced it.

    What the replay of a request produces is dropped until the response holds what the client has.
    """

    def __init__(self, transport: asyncio.Transport, recording: ConnectionRecording) -> None:
        super().__init__()
        self.recording = recording
        self._transport = transport
        self._is_muted = False
        self._ahead = 0  # recorded bytes that are not written yet

    # replay

    @property
    def is_muted(self) -> bool:
        """Whether writes are dropped, because the client has got them from another process."""
        return self._is_muted

    def mute(self) -> None:
        """Drop everything that is written until `unmute`."""
        self._is_muted = True

    def unmute(self) -> None:
        """Pass what is written from now on."""
        self._is_muted = False

    def write_recorded(self, data: bytes) -> None:
        """Write bytes that another process has recorded but not written."""
        if data:
            self._transport.write(data)

    async def record(self, data: Sequence[Data]) -> None:
        """Record all bytes of one part; the next writes must be these bytes, in any pieces."""
        if self.recording.is_closed:
            return
        size = sum(map(len, data))
        self.recording.prepare(size, self._transport.get_write_buffer_size() + self._ahead)
        for piece in data:
            self.recording.fill(piece)
            if len(piece) >= LARGE_BYTES:
                await asyncio.sleep(0)  # other streams go on
        self.recording.complete()
        self._ahead += size

    # asyncio.WriteTransport

    def write(self, data: Data) -> None:
        """Record and write bytes."""
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Data]) -> None:
        """Record and write several pieces as one. None of them is joined with another."""
        parts = list(list_of_data)
        if self._is_muted:
            return
        if self._ahead:
            self._ahead -= sum(map(len, parts))
        else:
            self.recording.sent(parts, self._transport.get_write_buffer_size())
        for part in parts:
            self._transport.write(part)

    def write_eof(self) -> None:
        """Close the write end after flushing buffered data."""
        self._transport.write_eof()

    def can_write_eof(self) -> bool:
        """Return whether `write_eof` is supported."""
        return self._transport.can_write_eof()

    def get_write_buffer_size(self) -> int:
        """Return the bytes that the socket has not accepted yet."""
        return self._transport.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the low and high limit of flow control, in bytes."""
        return self._transport.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits of flow control, in bytes."""
        self._transport.set_write_buffer_limits(high=high, low=low)

    # asyncio.ReadTransport

    def is_reading(self) -> bool:
        """Return whether data is received."""
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        """Receive no data until `resume_reading`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Receive data again."""
        self._transport.resume_reading()

    # asyncio.BaseTransport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return a fact about the connection."""
        return self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Set the protocol that receives data."""
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol that receives data."""
        return self._transport.get_protocol()

    def is_closing(self) -> bool:
        """Return whether the connection is closed or being closed."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection after everything that was written has been sent."""
        self.recording.closes()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()
