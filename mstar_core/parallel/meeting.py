"""Meeting place of a tensor-parallel group whose members are on several hosts: two TCP ports of the leader's host.

The supervisor chooses the ports for each epoch and passes them to all members as `--meet HOST:STORE_PORT:PLAN_PORT`.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from dataclasses import dataclass, field
from typing import Final, Self

from mstar_core.errors import ConfigError, StartError

PORTS: Final = range(1, 1 << 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Ports of the leader's host, and what a member needs to use them.

    host: address of the leader's host. store_port: of torch's TCPStore. plan_port: of the plans. address: of this
    process's host, whose network interface collectives use. hosts: names of the members' hosts in the order of the
    ranks, for messages. secret: of the deployment; members prove to each other that they have it.
    """

    host: str
    store_port: int
    plan_port: int
    address: str
    hosts: tuple[str, ...]
    secret: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str, *, address: str, hosts: tuple[str, ...], secret: bytes) -> Self:
        """Read `HOST:STORE_PORT:PLAN_PORT`. Raises ConfigError."""
        host, *ports = text.rsplit(":", 2)
        if not host or len(ports) != 2 or not all(port.isdecimal() and int(port) in PORTS for port in ports):
            raise ConfigError(f"{text!r} is not the meeting place of a group", hint="use HOST:STORE_PORT:PLAN_PORT")
        store_port, plan_port = map(int, ports)
        return cls(host=host, store_port=store_port, plan_port=plan_port, address=address, hosts=hosts, secret=secret)

    @property
    def plans(self) -> str:
        """Address and port of the plans, for messages: `10.0.0.1:4001`."""
        return f"{self.host}:{self.plan_port}"

    def key(self, purpose: str) -> bytes:
        """Return the key of 32 bytes for a purpose, which names the group and its epoch."""
        return hmac.digest(self.secret, f"mstar group {purpose}".encode(), hashlib.sha256)


def listen(host: str, port: int, purpose: str) -> socket.socket:
    """Listen on a port of the leader's host. Raises StartError with the purpose if it cannot be had."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise StartError(
            f"the leader of a tensor-parallel group cannot listen at {host}:{port} for {purpose}",
            error.strerror or str(error),
            "let ray.ports be a range that no other program uses",
            phase="group",
        ) from error
