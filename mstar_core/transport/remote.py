"""Access of processes of other hosts to this one: an address, ports, and the key pair of the deployment."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import zmq

from mstar_core.errors import TransportError


class CurveKeys(NamedTuple):
    """A CURVE key pair, both in Z85 (ZeroMQ RFC 26 and 32)."""

    public: str
    secret: str

    def __repr__(self) -> str:  # logs and traces show no secret
        return f"CurveKeys({self.public!r})"


class RemoteAccess(NamedTuple):
    """Address, ports and keys of this process for those of other hosts.

    ports: first and last that may be used; None: any. keys: of this process, as a rule those of the deployment.
    accepts: public key of the clients, no others are accepted; empty: `keys.public`.
    """

    address: str
    keys: CurveKeys
    ports: tuple[int, int] | None = None
    accepts: str = ""

    @property
    def accepted_key(self) -> str:
        """Public key of the clients."""
        return self.accepts or self.keys.public


def bind_remote(socket: zmq.Socket[bytes], access: RemoteAccess) -> str:
    """Bind a socket to a free port at `access.address`. Returns the endpoint, `tcp://ADDRESS:PORT`.

    Raises TransportError when the address is not of this host or no port is free.
    """
    if ":" in access.address:
        socket.setsockopt(zmq.IPV6, 1)
    host = f"[{access.address}]" if ":" in access.address else access.address
    for port in _ports(access.ports):
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE and access.ports is not None:
                continue
            raise TransportError(
                "a socket for other hosts cannot be opened",
                f"{access.address}:{port}: {error}",
                "the address must belong to an interface of this host; see ray.network",
            ) from error
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    assert access.ports is not None, "any port is one attempt"
    first, last = access.ports
    raise TransportError(
        "no port for other hosts is free",
        f"all of {first}-{last} at {access.address} are in use",
        "make ray.ports larger: each process needs two ports",
    )


def _ports(ports: tuple[int, int] | None) -> Iterator[int | str]:
    """Yield each port once, from a random one on: processes that start together then rarely try the same."""
    if ports is None:
        yield "*"
        return
    first, last = ports
    count = last - first + 1
    start = random.randrange(count)
    yield from (first + (start + number) % count for number in range(count))
