"""Short-lived keys that clients give to browsers. Kept as digests in the memory of the api, owned by the service."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.errors import Overloaded

PREFIX: Final = "ek_"
MOST_SECRETS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecret:
    """Rights of a secret: to open sessions in the name of a key. key: digest of the API key that created it.

    expires: seconds since the epoch. session: fields that its sessions begin with.
    """

    key: str
    expires: float
    session: Mapping[str, Any]


class ClientSecrets:
    """Secrets by their digest. A secret may open several sessions until it expires."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """clock: seconds since the epoch."""
        self._clock = clock
        self._secrets: dict[bytes, ClientSecret] = {}

    def create(self, key: str, seconds: float, session: Mapping[str, Any]) -> tuple[str, ClientSecret]:
        """Return a new secret. Raises Overloaded if too many are valid."""
        now = self._clock()
        if len(self._secrets) >= MOST_SECRETS:
            self._secrets = {digest: each for digest, each in self._secrets.items() if each.expires > now}
        if len(self._secrets) >= MOST_SECRETS:
            raise Overloaded(
                f"{MOST_SECRETS} client secrets are valid", hint="let them expire sooner", code="key_limit"
            )
        value = PREFIX + secrets.token_urlsafe(32)
        secret = ClientSecret(key=key, expires=now + seconds, session=session)
        self._secrets[_digest(value)] = secret
        return value, secret

    def find(self, value: str) -> ClientSecret | None:
        """Return the rights of a secret, None if it is unknown or has expired."""
        secret = self._secrets.get(_digest(value)) if value.startswith(PREFIX) else None
        return secret if secret is not None and secret.expires > self._clock() else None


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode(errors="surrogateescape")).digest()
