"""Listening socket and TLS context of the api. Created before anything is loaded, so that a wrong setting fails
the start.
"""

from __future__ import annotations

import socket
import ssl

from mstar_core.config.deployment import ApiConfig
from mstar_core.errors import StartError


def tls_context(api: ApiConfig) -> ssl.SSLContext | None:
    """Return the TLS context; None for plain HTTP. Raises StartError."""
    if api.tls_cert is None and api.tls_key is None:
        return None
    if api.tls_cert is None or api.tls_key is None:
        raise StartError(
            "api.tls_cert and api.tls_key must be set together",
            hint="set both or neither",
            phase="plan",
            key="api.tls_cert",
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password, OpenSSL would prompt on the terminal for the one of an encrypted key.
        context.load_cert_chain(api.tls_cert, api.tls_key, password="")
    except (OSError, ssl.SSLError) as error:
        raise StartError(
            f"the certificate {api.tls_cert} cannot be used", str(error),
            "use PEM files of a certificate and its unencrypted key",
            phase="plan", key="api.tls_cert",
        ) from error  # fmt: skip
    return context


def bind(host: str, port: int) -> socket.socket:
    """Bind the port without listening. Raises StartError if the port is in use or the host is not local."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, proto)
    except OSError as error:
        raise StartError(f"{host} is not a valid address", str(error), "use another --host", phase="plan") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.setblocking(False)
    except OSError as error:
        made.close()
        hint = "use another --port, or stop the process that uses it"
        raise StartError(f"port {port} on {host} cannot be used", str(error), hint, phase="plan") from error
    return made
