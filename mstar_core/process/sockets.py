"""Sockets of a child process: courier, mailbox and tensors, as the deployment spec wants them.

Used by the mains of api, conductor, workers and followers, and by the one that fetches the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from mstar_core.closing import Closing
from mstar_core.config.deployment import DeploymentSpec
from mstar_core.messages.wire import WireCodec
from mstar_core.process.life import ChildArguments, ChildLife
from mstar_core.transport import KEYS_FILE, Courier, Mailbox, RemoteAccess, read_keys
from mstar_core.transport.courier import MESSAGE_BYTES

if TYPE_CHECKING:
    from mstar_core.transport.shm import TensorTransport


def remote_access(spec: DeploymentSpec) -> RemoteAccess | None:
    """Return how processes of other hosts reach those of this one; None if the deployment has one host.

    Raises TransportError if the run directory lacks the keys of the deployment.
    """
    if not spec.hosts:
        return None
    return RemoteAccess(spec.address, read_keys(Path(spec.run_dir) / KEYS_FILE), spec.ray.port_range)


class ChildSockets(Closing):
    """Owned by the main of a process, which opens what it needs. life: of the process towards its supervisor."""

    def __init__(
        self,
        arguments: ChildArguments,
        *,
        message_bytes: int = MESSAGE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """message_bytes: limit of one message that it sends. Raises TransportError."""
        name, incarnation = arguments.name, arguments.incarnation
        self._spec = arguments.spec
        self._remote = remote_access(self._spec)
        self._codec = WireCodec(name, incarnation)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._opened: list[Closing] = []
        self._tensors: TensorTransport | None = None
        keys = None if self._remote is None else self._remote.keys
        self.courier: Courier = Courier(self._context, self._codec, message_bytes=message_bytes, keys=keys)
        self.life = ChildLife(name, incarnation, self._spec, self.courier, supervisor=arguments.supervisor, clock=clock)

    def open_tensors(self) -> TensorTransport:
        """Open the transport by which this process lends tensors and reads those of others. Raises TransportError."""
        from mstar_core.transport.shm import (
            TensorTransport,  # here, because it loads numpy, which not all children need
        )

        tensors = TensorTransport(self.life.name, self.life.incarnation, self._spec.ipc_dir, remote=self._remote)
        self._opened.append(tensors)
        self._tensors = tensors
        self.life.fd_endpoint, self.life.blob_endpoint = tensors.endpoint, tensors.blob_endpoint
        return tensors

    def open_mailbox(self) -> Mailbox:
        """Open the mailbox, after the tensors. The next `beat` of the life announces it. Raises TransportError."""
        mailbox: Mailbox = Mailbox(self._context, self.life.endpoint, self._codec, remote=self._remote)
        mailbox.on_break, self.life.heard = self.life.link_broken, mailbox.heard
        if self._tensors is not None:
            self._tensors.deliver_in(mailbox)
        self._opened.append(mailbox)
        self.life.remote_endpoint = mailbox.remote_endpoint
        return mailbox

    def close(self, linger_s: float = 0.0) -> None:
        """Close everything. linger_s: time for queued messages to leave. Safe to call twice."""
        for opened in reversed(self._opened):
            opened.close()
        self._opened.clear()
        self.courier.close(linger_s)
        self._context.term()
