"""Client processes of a run: started, commanded through pipes, and read without blocking. Owned by the run."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from mstar_core.errors import MstarError
from mstarctl.bench.client.wire import ClientPlan, ClientReady, FromClient, Unpacker

START_S: Final = 30.0
QUIT_S: Final = 10.0
READ_BYTES: Final = 1 << 20
_DECODER: Final = msgspec.msgpack.Decoder(FromClient)


class Crew:
    """The client processes of one run. Entering starts them; leaving ends them."""

    def __init__(self, plans: list[ClientPlan], folder: Path) -> None:
        self._plans = plans
        self._folder = folder
        self._children: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._unpackers: dict[int, Unpacker] = {}

    def __enter__(self) -> Self:
        for plan in self._plans:
            path = self._folder / f"client-{plan.number}.plan"
            path.write_bytes(msgspec.msgpack.encode(plan))
            # -P is not used: clients find the same sources as their parent.
            child = subprocess.Popen(
                [sys.executable, "-m", "mstarctl.bench.client.process", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert child.stdout is not None
            self._children.append(child)
            self._unpackers[child.stdout.fileno()] = Unpacker()
            self._selector.register(child.stdout.fileno(), selectors.EVENT_READ)
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _wait_ready(self) -> None:
        waiting, end = {plan.number for plan in self._plans}, time.monotonic() + START_S
        while waiting:
            for message, _ in self.read(0.5):
                if isinstance(message, ClientReady):
                    waiting.discard(message.number)
            if time.monotonic() > end:
                raise MstarError("a client process did not start", f"{START_S:g} s", "run it again with --debug")

    def send(self, command: str) -> None:
        """Send a command to every client."""
        for child in self._children:
            assert child.stdin is not None
            try:
                child.stdin.write(f"{command}\n".encode())
                child.stdin.flush()
            except BrokenPipeError:
                continue  # its end is noticed by the next read

    def read(self, timeout_s: float) -> Iterator[tuple[FromClient, bytes]]:
        """Yield messages, decoded and raw, that arrive within a time. Raises MstarError if a client has ended."""
        for key, _ in self._selector.select(timeout_s):
            data = os.read(key.fd, READ_BYTES)
            if not data:
                self._selector.unregister(key.fd)
                raise MstarError("a client process ended", hint="its error is above; run it again with --debug")
            for raw in self._unpackers[key.fd].feed(data):
                yield _DECODER.decode(raw), raw

    def close(self) -> None:
        """Ask every client to end, and end those that do not."""
        self.send("quit")
        for child in self._children:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.close()
            drained = child.stdout
            try:
                while child.poll() is None and os.read(drained.fileno(), READ_BYTES):
                    pass
                child.wait(QUIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            drained.close()
        self._children.clear()
        self._selector.close()
