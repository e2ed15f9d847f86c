"""API keys of tenants: made at random, kept as hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from typing import Final

import msgspec

PREFIX: Final = "mstar-"
KEY_BYTES: Final = 32
"""Random bytes of a key. No list of likely keys of 256 bits exists that a slow hash would resist."""

ID_CHARS: Final = 12


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One key of a tenant. hash: SHA-256 of its text in hex. note: for people.

    created: seconds since the epoch. revoked: time until which the key is valid, None for no end.
    """

    hash: str
    created: float = 0.0
    revoked: float | None = None
    note: str = ""

    @property
    def id(self) -> str:
        """Return the name of the key in lists and in usage: the first characters of its hash."""
        return self.hash[:ID_CHARS]

    def is_valid(self, now: float) -> bool:
        """Return whether requests with the key are accepted."""
        return self.revoked is None or now < self.revoked


def new_key() -> str:
    """Return a new random key. Its text is shown once and never stored."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_of(key: str) -> str:
    """Return the hash under which a key is stored."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def match(key: str, records: Iterable[tuple[str, KeyRecord]]) -> tuple[str, KeyRecord] | None:
    """Return the tenant and the record of a key, None for an unknown one.

    Compares with every record, so that the time of an answer does not depend on which one is equal.
    """
    digest = hash_of(key)
    found = None
    for tenant, record in records:
        if hmac.compare_digest(digest, record.hash):
            found = tenant, record
    return found
