"""Between processes: typed mailboxes for messages, transports for tensors. No torch."""

from __future__ import annotations

from mstar_core.transport.address import arena_path, mailbox_endpoint
from mstar_core.transport.arena import Arena, ArenaReader, FdServer
from mstar_core.transport.blobs.client import Fetch
from mstar_core.transport.courier import Courier
from mstar_core.transport.curve import KEYS_FILE, make_keys, read_keys, write_keys
from mstar_core.transport.mailbox import Mailbox, Malformed
from mstar_core.transport.numbered import LinkBreak
from mstar_core.transport.remote import CurveKeys, RemoteAccess
from mstar_core.transport.shm import TensorTransport
from mstar_core.transport.spin import Spin
from mstar_core.transport.tensors import Loan, loan_of

__all__ = [
    "KEYS_FILE",
    "Arena",
    "ArenaReader",
    "Courier",
    "CurveKeys",
    "FdServer",
    "Fetch",
    "LinkBreak",
    "Loan",
    "Mailbox",
    "Malformed",
    "RemoteAccess",
    "Spin",
    "TensorTransport",
    "arena_path",
    "loan_of",
    "mailbox_endpoint",
    "make_keys",
    "read_keys",
    "write_keys",
]
