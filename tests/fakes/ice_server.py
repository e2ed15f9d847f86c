"""A STUN and TURN server on a local port, as far as gathering candidates needs it. It relays nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aioice import stun
from aioice.turn import make_integrity_key

MAPPED = ("127.0.0.9", 4242)
RELAYED = ("127.0.0.9", 4243)
REALM = "test"


class IceServer(asyncio.DatagramProtocol):
    """Answers Binding with MAPPED; Allocate with RELAYED for a user of `users` (name -> password). RFC 8489, RFC 8656.

    bindings: Binding requests that came. allocated: user of each address that is held. refused: wrong passwords.
    """

    def __init__(self) -> None:
        self.users: dict[str, str] = {}
        self.bindings = 0
        self.allocated: list[str] = []
        self.refused = 0
        self.port = 0
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: Any) -> None:
        try:
            request = stun.parse_message(data)
        except ValueError:
            return  # a check of candidates
        answer, key = self._answer(request)
        if key is not None:
            answer.add_message_integrity(key)
        assert self._transport is not None
        self._transport.sendto(bytes(answer), addr)

    def _answer(self, request: stun.Message) -> tuple[stun.Message, bytes | None]:
        method = request.message_method
        if method == stun.Method.BINDING:
            self.bindings += 1
            return _message(request, stun.Class.RESPONSE, {"XOR-MAPPED-ADDRESS": MAPPED}), None
        user = request.attributes.get("USERNAME")
        key = make_integrity_key(user, REALM, self.users[user]) if user in self.users else None
        if key is None or not request.check_message_integrity(key):
            self.refused += user is not None
            facts = {"ERROR-CODE": (401, "Unauthorized"), "REALM": REALM, "NONCE": b"once"}
            return _message(request, stun.Class.ERROR, facts), None
        lifetime = request.attributes["LIFETIME"]
        if method == stun.Method.ALLOCATE:
            self.allocated.append(user)
        elif lifetime == 0:
            self.allocated.remove(user)
        facts = {"LIFETIME": lifetime, "XOR-MAPPED-ADDRESS": MAPPED, "XOR-RELAYED-ADDRESS": RELAYED}
        return _message(request, stun.Class.RESPONSE, facts), key


def _message(request: stun.Message, kind: stun.Class, attributes: dict[str, Any]) -> stun.Message:
    return stun.Message(request.message_method, kind, request.transaction_id, attributes)


@asynccontextmanager
async def ice_server() -> AsyncIterator[IceServer]:
    """Serve on a free port of the loopback address."""
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        IceServer, local_addr=("127.0.0.1", 0)
    )
    try:
        yield server
    finally:
        transport.close()
