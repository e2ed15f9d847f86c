"""Which addresses the server may fetch from: public ones alone, whatever form they are written in. Used by `fetch`."""

from __future__ import annotations

import ipaddress
from typing import Final

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

TUNNELS: Final = tuple(
    ipaddress.IPv6Network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")
)
"""IPv6 ranges that carry an IPv4 address inside: translation, 6to4, Teredo, IPv4-compatible."""

UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""All IPv6 addresses that were ever given out for the internet (RFC 4291, IANA); no other is one, as fec0::/10."""

SPECIAL: Final = tuple(
    ipaddress.ip_network(text) for text in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "3fff::/20")
)
"""Ranges for protocols and documents that some releases of `ipaddress` take for public."""


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet. An IPv4 address in IPv6 clothes is judged as what it is."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address not in UNICAST or any(address in tunnel for tunnel in TUNNELS):
            return False
    if any(address in network for network in SPECIAL):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
