"""STUN and TURN servers of WebRTC calls, with credentials that are valid now. For calls, and for clients of them."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final

from mstar_core.api.schema import IceServerAnswer
from mstar_core.config.resolved import ApiConfig

USER: Final = "mstar"
"""Name in users that expire, unless the configuration names another."""


def ice_servers(api: ApiConfig, expires: float) -> list[IceServerAnswer]:
    """Return the configured servers. expires: time in seconds since the epoch at which users of a secret expire."""
    answers: list[IceServerAnswer] = []
    for server, secret in zip(api.realtime_ice_servers, api.ice_secrets, strict=True):
        urls = list(server.urls)
        if server.secret_file is not None:
            username = f"{int(expires)}:{server.username or USER}"
            answers.append(IceServerAnswer(urls=urls, username=username, credential=turn_password(secret, username)))
        elif server.credential_file is not None and server.username is not None:
            answers.append(IceServerAnswer(urls=urls, username=server.username, credential=secret))
        else:
            answers.append(IceServerAnswer(urls=urls))
    return answers


def turn_password(secret: str, username: str) -> str:
    """Return the password of a user that expires: base64 of the HMAC-SHA1 of its name.

    Source: draft-uberti-behave-turn-rest-00, section 2.2; coturn's `use-auth-secret`.
    """
    return base64.b64encode(hmac.digest(secret.encode(), username.encode(), hashlib.sha1)).decode()
