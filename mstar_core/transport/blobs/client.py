"""Blob client: fetches tensors from the blob servers of other hosts without blocking. Owned by `TensorTransport`.

A thread receives the tensors. Their outcomes reach the owner's main loop by a descriptor that its mailbox watches.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import zmq

from mstar_core.closing import Closing
from mstar_core.errors import TransportError
from mstar_core.messages.tensors import ShmTensor
from mstar_core.transport.blobs.transfers import OwnerAddress, Transfers
from mstar_core.transport.dtypes import Array
from mstar_core.transport.remote import CurveKeys

LOOK_MS: Final = 500
"""Interval in which silence is counted while a tensor is on its way."""

_FLAGS: Final = os.EFD_NONBLOCK | os.EFD_CLOEXEC

log = logging.getLogger(__name__)


class Fetch:
    """A tensor of another host on its way. Used on the main loop of its process."""

    def __init__(self, ref: ShmTensor, then: Callable[[Fetch], None] | None, cancel: Callable[[], None]) -> None:
        self.ref = ref
        self._then = then
        self._cancel = cancel
        self._outcome: Array | TransportError | None = None

    @property
    def is_done(self) -> bool:
        """Whether `result` returns the tensor or raises its error."""
        return self._outcome is not None

    def result(self) -> Array:
        """Return the tensor, writable and in C order. Raises TransportError if it could not be fetched."""
        if self._outcome is None:
            raise TransportError("a tensor of another host has not arrived", str(self.ref), peer=self.ref.owner)
        if isinstance(self._outcome, TransportError):
            raise self._outcome
        return self._outcome

    def cancel(self) -> None:
        """Stop fetching. The callback is not called any more. Has no effect once the fetch is done."""
        self._then = None
        if self._outcome is None:
            self._cancel()

    def end(self, outcome: Array | TransportError) -> None:
        """Set the outcome and run the callback. Called by `BlobClient`."""
        self._outcome = outcome
        then, self._then = self._then, None
        if then is not None:
            then(self)


class BlobClient(Closing):
    """Fetches of one process. Its methods are called on one thread, the owner's main loop.

    fd: readable when `deliver` has something to do.
    """

    def __init__(self, keys: CurveKeys) -> None:
        self._keys = keys
        self._owners: dict[str, OwnerAddress] = {}
        self._fetches: dict[int, Fetch] = {}
        self._last_number = 0
        self._lock = threading.Lock()  # holds together each of the two queues and its descriptor
        self._outcomes: deque[tuple[int, Array | TransportError]] = deque()
        self._commands: deque[Callable[[_Receiver], None]] = deque()
        self.fd = os.eventfd(0, _FLAGS)
        self._commands_fd = os.eventfd(0, _FLAGS)
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def live(self) -> int:
        """Number of fetches without an outcome."""
        return len(self._fetches)

    def connect(self, owner: str, endpoint: str, incarnation: int) -> None:
        """Register the blob server of `owner`. A newer incarnation replaces an older one."""
        known = self._owners.get(owner)
        if known is not None and known.incarnation >= incarnation:
            return
        self.forget(owner)
        self._owners[owner] = OwnerAddress(owner, endpoint, incarnation)

    def knows(self, owner: str) -> bool:
        """Return whether the blob server of `owner` is registered."""
        return owner in self._owners

    def fetch(self, ref: ShmTensor, then: Callable[[Fetch], None] | None = None) -> Fetch:
        """Begin to fetch a tensor. then: called by `deliver` when it has come or failed."""
        self._last_number += 1
        number = self._last_number
        fetch = self._fetches[number] = Fetch(ref, then, lambda: self._forget_fetch(number))
        owner = self._owners.get(ref.owner)
        if owner is None:
            self._put_outcome(number, _gone(ref.owner))
        else:
            self._post(lambda receiver: receiver.start(owner, number, ref))
        return fetch

    def forget(self, owner: str, incarnation: int | None = None) -> None:
        """Fail the fetches from a dead owner and drop the connection. incarnation: the one that ended."""
        known = self._owners.get(owner)
        if known is None or (incarnation is not None and known.incarnation > incarnation):
            return
        del self._owners[owner]
        if self._thread is not None:
            self._post(lambda receiver: receiver.forget(owner))

    def deliver(self) -> None:
        """Run the callbacks of fetches that have ended. An error of one of them is logged."""
        if not self._outcomes:
            return
        with self._lock:
            with suppress(BlockingIOError):
                os.eventfd_read(self.fd)
            outcomes, self._outcomes = self._outcomes, deque()
        for number, outcome in outcomes:
            fetch = self._fetches.pop(number, None)
            if fetch is None:
                continue  # cancelled
            try:
                fetch.end(outcome)
            except Exception:  # isolation boundary: one tensor
                log.exception("the receiver of a tensor failed")

    def close(self) -> None:
        """Drop all fetches, whose callbacks are not called. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fetches.clear()
        if self._thread is not None:
            self._post(_Receiver.stop)
            self._thread.join()
        os.close(self.fd)
        os.close(self._commands_fd)

    def _forget_fetch(self, number: int) -> None:
        if self._fetches.pop(number, None) is not None and not self._is_closed:
            self._post(lambda receiver: receiver.cancel(number))

    def _post(self, command: Callable[[_Receiver], None]) -> None:
        with self._lock:
            self._commands.append(command)
            os.eventfd_write(self._commands_fd, 1)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mstar-fetches", daemon=True)
            self._thread.start()

    def _put_outcome(self, number: int, outcome: Array | TransportError) -> None:
        with self._lock:
            self._outcomes.append((number, outcome))
            os.eventfd_write(self.fd, 1)

    def _take_commands(self) -> deque[Callable[[_Receiver], None]]:
        with self._lock:
            with suppress(BlockingIOError):
                os.eventfd_read(self._commands_fd)
            commands, self._commands = self._commands, deque()
        return commands

    def _run(self) -> None:
        receiver = _Receiver(self._keys, self._commands_fd, self._take_commands, self._put_outcome)
        while receiver.is_running:
            try:
                receiver.run()
            except Exception:  # isolation boundary: what is fetched now
                log.exception("tensors of other hosts were not fetched")
                receiver.fail_all()
        receiver.close()


class _Receiver:
    """State of the thread: the connections to owners that a tensor was fetched from."""

    def __init__(
        self,
        keys: CurveKeys,
        commands_fd: int,
        take_commands: Callable[[], deque[Callable[[_Receiver], None]]],
        ended: Callable[[int, Array | TransportError], None],
    ) -> None:
        self._keys = keys
        self._take_commands = take_commands
        self._ended = ended
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._owners: dict[str, Transfers] = {}
        self._poller = zmq.Poller()
        self._poller.register(commands_fd, zmq.POLLIN)
        self.is_running = True

    def run(self) -> None:
        """Receive until `stop`."""
        seen = time.monotonic()
        while self.is_running:
            is_busy = any(each.is_busy for each in self._owners.values())
            self._poller.poll(LOOK_MS if is_busy else None)
            for each in self._owners.values():
                each.receive()
            now = time.monotonic()
            # Time in which this process did not run does not count as silence of an owner.
            self._pass(min(now - seen, 2 * LOOK_MS / 1000) if is_busy else 0.0)
            seen = now
            for command in self._take_commands():
                command(self)

    def fail_all(self) -> None:
        """Fail all fetches and drop all connections."""
        for owner in list(self._owners):
            self._drop(owner, "a tensor of another host does not arrive", "fetching failed")

    def close(self) -> None:
        for each in self._owners.values():
            each.close()
        self._context.term()

    def start(self, owner: OwnerAddress, number: int, ref: ShmTensor) -> None:
        transfers = self._owners.get(owner.name)
        if transfers is None:
            try:
                transfers = Transfers(self._context, self._keys, owner, self._ended)
            except TransportError as error:
                self._ended(number, error)
                return
            self._owners[owner.name] = transfers
            self._poller.register(transfers.socket, zmq.POLLIN)
        transfers.start(number, ref)

    def cancel(self, number: int) -> None:
        for each in self._owners.values():
            each.cancel(number)

    def forget(self, owner: str) -> None:
        if owner in self._owners:
            self._drop(owner, "the owner of a tensor is gone", "it ended")

    def stop(self) -> None:
        self.is_running = False

    def _drop(self, owner: str, title: str, detail: str) -> None:
        transfers = self._owners.pop(owner)
        self._poller.unregister(transfers.socket)
        transfers.fail(title, detail)
        transfers.close()

    def _pass(self, seconds: float) -> None:
        for each in self._owners.values():
            before = each.socket
            if each.passed(seconds):
                self._poller.unregister(before)
                self._poller.register(each.socket, zmq.POLLIN)


def _gone(owner: str) -> TransportError:
    return TransportError("the owner of a tensor is gone", f"no blob server of {owner} is known here", peer=owner)
