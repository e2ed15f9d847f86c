"""Messages between the parent of a load test and its client processes: a plan file, records and counters."""

from __future__ import annotations

import struct
from typing import Final

import msgspec

HEAD: Final = struct.Struct("<I")
"""Length of the message that follows, in bytes."""


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Destination of every request. address: resolved once. prefix: path before the routes."""

    address: str
    port: int
    host: str
    is_tls: bool = False
    is_verified: bool = True
    prefix: str = ""
    headers: dict[str, str] = {}


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One request. due_s: intended time after the start of its phase; negative in closed loops.

    offset, size_bytes: its body in the file of bodies. cancel_after_s: disconnect then; 0 does not.
    """

    index: int
    due_s: float
    path: str
    content_type: str
    accept: str
    request_id: str
    offset: int
    size_bytes: int
    cancel_after_s: float = 0.0


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a run. clients: closed loops; 0 is an open load. period_s: of control loops, 0 for none.

    span_s: time after which closed loops end; 0 ends them with their jobs. Closed loops with a span repeat their jobs.
    limit_s: time after which no further job is sent, although some are left; 0 has no limit.
    """

    jobs: list[Job]
    clients: int = 0
    think_s: float = 0.0
    period_s: float = 0.0
    span_s: float = 0.0
    limit_s: float = 0.0


class ClientPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one client process does. bodies: file with the bodies of all requests."""

    number: int
    server: ServerAddress
    bodies: str
    phases: list[Phase]
    timeout_s: float
    grace_s: float
    max_in_flight: int


class Record(msgspec.Struct, array_like=True, tag="record"):
    """One request as it was received. Times are monotonic nanoseconds; 0 is never.

    retry_after_s: time that the server asked to wait, negative without one.
    marks: (bytes of the body received, time) after each read. error: empty, `transport`, `timeout`, `incomplete`,
    `cancelled` or `skipped` (the tick of a control loop whose previous request was still running).
    """

    phase: int
    index: int
    client: int
    due_ns: int
    sent_ns: int
    headers_ns: int
    end_ns: int
    status: int
    error: str
    detail: str
    is_reused: bool
    content_type: str
    marks: list[tuple[int, int]]
    body: bytes
    retry_after_s: float = -1.0


class Counters(msgspec.Struct, array_like=True, tag="counters"):
    """State of one client process, four times a second. loop_lag_ms: the longest delay of a 10 ms ticker since."""

    number: int
    time_ns: int
    sent: int
    ended: int
    in_flight: int
    cpu_s: float
    rss_bytes: int
    loop_lag_ms: float
    switches: int


class PhaseEnd(msgspec.Struct, array_like=True, tag="end"):
    """A phase has ended. reason: empty, or `max_in_flight`."""

    number: int
    phase: int
    reason: str


class ClientReady(msgspec.Struct, array_like=True, tag="ready"):
    """The client process has loaded its plan."""

    number: int


FromClient = Record | Counters | PhaseEnd | ClientReady


def packed(message: FromClient) -> bytes:
    """Return a message with its length."""
    data = msgspec.msgpack.encode(message)
    return HEAD.pack(len(data)) + data


class Unpacker:
    """Splits a byte stream into messages. Owned by the reader of one pipe."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete with `data`, without their lengths."""
        self._held += data
        messages, at = [], 0
        while len(self._held) - at >= HEAD.size:
            (size,) = HEAD.unpack_from(self._held, at)
            if len(self._held) - at - HEAD.size < size:
                break
            messages.append(bytes(self._held[at + HEAD.size : at + HEAD.size + size]))
            at += HEAD.size + size
        del self._held[:at]
        return messages
