"""Between processes: typed mailboxes for messages, transports for tensors. No torch."""

from __future__ import annotations

from mstar_core.transport.address import arena_path, mailbox_endpoint
from mstar_core.transport.arena import Arena
from mstar_core.transport.arena_reader import ArenaReader
from mstar_core.transport.codec import Decodes, Encodes
from mstar_core.transport.courier import Courier, CourierCounters, OutboxLimits, Pending
from mstar_core.transport.fd_server import FdServer
from mstar_core.transport.mailbox import Mailbox, Malformed
from mstar_core.transport.spin import Spin
from mstar_core.transport.tensors import TRANSPORTS, Loan, TensorTransport, loan_of, open_transport

__all__ = [
    "TRANSPORTS",
    "Arena",
    "ArenaReader",
    "Courier",
    "CourierCounters",
    "Decodes",
    "Encodes",
    "FdServer",
    "Loan",
    "Mailbox",
    "Malformed",
    "OutboxLimits",
    "Pending",
    "Spin",
    "TensorTransport",
    "arena_path",
    "loan_of",
    "mailbox_endpoint",
    "open_transport",
]
