"""Between processes: typed mailboxes for messages, transports for tensors. No torch.

The modules of tensors load numpy, which conductor and supervisor do without, so they are not imported here.
"""

from __future__ import annotations

from mstar_core.transport.address import arena_path, mailbox_endpoint
from mstar_core.transport.courier import Courier
from mstar_core.transport.curve import KEYS_FILE, make_keys, read_keys, write_keys
from mstar_core.transport.mailbox import Mailbox, Malformed
from mstar_core.transport.numbered import LinkBreak
from mstar_core.transport.remote import CurveKeys, RemoteAccess
from mstar_core.transport.spin import Spin

__all__ = [
    "KEYS_FILE",
    "Courier",
    "CurveKeys",
    "LinkBreak",
    "Mailbox",
    "Malformed",
    "RemoteAccess",
    "Spin",
    "arena_path",
    "mailbox_endpoint",
    "make_keys",
    "read_keys",
    "write_keys",
]
