"""Wire format: MessagePack of an envelope around one tagged message. Used by every process."""

from __future__ import annotations

from typing import Protocol

import msgspec

from mstar_core.errors import TransportError
from mstar_core.messages.adapters import AdapterMessage
from mstar_core.messages.flow import FlowMessage
from mstar_core.messages.hosts import HostMessage
from mstar_core.messages.life import LifeMessage
from mstar_core.messages.requests import RequestMessage
from mstar_core.messages.sleep import SleepMessage
from mstar_core.messages.work import WorkMessage

WIRE_VERSION = 2
"""Major version of the wire format. Within it fields are only added, and unknown fields are skipped."""

Message = LifeMessage | HostMessage | RequestMessage | WorkMessage | FlowMessage | AdapterMessage | SleepMessage


class Sender(Protocol):
    """A non-blocking sender of messages to peers by name. Returns False for an unknown peer."""

    def send(self, name: str, message: Message) -> bool: ...


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """[version, sender's name, sender's incarnation, message]."""

    version: int
    sender: str
    incarnation: int
    body: Message


class WireCodec:
    """Encodes the messages of this process and decodes those of all. Owned by the process's main loop."""

    def __init__(self, sender: str, incarnation: int) -> None:
        self.sender = sender
        self.incarnation = incarnation
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Envelope)

    def encode(self, message: Message) -> bytes:
        """Return a message in this process's envelope as bytes."""
        return self._encoder.encode(Envelope(WIRE_VERSION, self.sender, self.incarnation, message))

    def decode(self, data: bytes | memoryview) -> Envelope:
        """Return the envelope in `data`. Raises TransportError with the cause for anything else."""
        try:
            envelope = self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise TransportError("a message could not be read", f"{len(data)} bytes: {error}") from error
        if envelope.version != WIRE_VERSION:
            raise TransportError(
                f"{envelope.sender} speaks wire version {envelope.version}, this process {WIRE_VERSION}",
                hint="restart the deployment so that all processes have one version",
                peer=envelope.sender,
            )
        return envelope
