"""ZAP authenticator: accepts the CURVE clients of one ZMQ context that have one public key (ZeroMQ RFC 27).

libzmq queries it once for each new connection of a socket of `serve_curve`. Its thread sleeps meanwhile.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils import z85

from mstar_core.closing import Closing
from mstar_core.errors import TransportError

ENDPOINT: Final = "inproc://zeromq.zap.01"
FREED_S: Final = 0.5
VERSION: Final = b"1.0"
CURVE_FRAMES: Final = 7  # version, request id, domain, address, identity, mechanism, key
REPORT_S: Final = 60.0

log = logging.getLogger(__name__)


class Authenticator(Closing):
    """Accepts one public key. One for each context, opened before its CURVE sockets are bound."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        public_key: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """public_key: of the clients, in Z85. Raises TransportError when the context has an authenticator already."""
        self._context = context
        self._key = z85.decode(public_key.encode())
        self._refusals = _Refusals(clock)
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._bind()
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise TransportError("a ZMQ context authenticates clients already", str(error)) from error
        self._thread = threading.Thread(target=self._serve, name="mstar-zap", daemon=True)
        self._thread.start()

    def _bind(self) -> None:
        """Bind, also if an earlier authenticator has just closed: ZMQ frees its endpoint a moment later."""
        until = time.monotonic() + FREED_S
        while True:
            try:
                self._socket.bind(ENDPOINT)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > until:
                    raise
            time.sleep(0.01)

    def close(self) -> None:
        """End the thread. Later connections are refused. Safe to call twice."""
        if self._context.closed or not self._thread.is_alive():
            return
        with self._context.socket(zmq.REQ) as stop:
            stop.setsockopt(zmq.LINGER, 0)
            stop.connect(ENDPOINT)
            stop.send(b"")
            self._thread.join()

    def _serve(self) -> None:
        try:
            while len(frames := self._socket.recv_multipart()) > 1:
                self._socket.send_multipart(self._answer(frames))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close(0)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        number = frames[1]
        if len(frames) == CURVE_FRAMES and hmac.compare_digest(frames[6], self._key):
            return [VERSION, number, b"200", b"OK", b"", b""]
        self._refusals.count(b"".join(frames[3:4]).decode(errors="replace"))
        return [VERSION, number, b"400", b"unknown key", b"", b""]


class _Refusals:
    """Reports refused connections at most once a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._count = 0
        self._next_report = 0.0

    def count(self, address: str) -> None:
        self._count += 1
        if self._clock() >= self._next_report:
            log.warning("refused %d connections with an unknown key, the last from %s", self._count, address)
            self._count = 0
            self._next_report = self._clock() + REPORT_S
