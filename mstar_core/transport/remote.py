"""Access of processes of other hosts to this one: an address, ports, and the key pair of the deployment."""

from __future__ import annotations

from typing import NamedTuple


class CurveKeys(NamedTuple):
    """A CURVE key pair, both in Z85 (ZeroMQ RFC 26 and 32)."""

    public: str
    secret: str


class RemoteAccess(NamedTuple):
    """Address, ports and keys of this process for those of other hosts.

    ports: first and last that may be used; None: any. keys: of the deployment; no others are accepted.
    """

    address: str
    keys: CurveKeys
    ports: tuple[int, int] | None = None
