"""The api's certificate. Read once, before anything else is done, so that a wrong file is a failed start."""

from __future__ import annotations

import socket
import ssl

from mstar_core.config.deployment import ApiConfig
from mstar_core.errors import StartError


def tls_context(api: ApiConfig) -> ssl.SSLContext | None:
    """The context of the api's port, None where it speaks plain HTTP. Raises StartError."""
    if api.tls_cert is None and api.tls_key is None:
        return None
    if api.tls_cert is None or api.tls_key is None:
        raise StartError(
            "api.tls_cert and api.tls_key go together", hint="give both, or neither", phase="plan", key="api.tls_cert"
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password OpenSSL would ask for the one of a locked key on the terminal, and wait for ever.
        context.load_cert_chain(api.tls_cert, api.tls_key, password="")
    except (OSError, ssl.SSLError) as error:
        raise StartError(
            f"the certificate {api.tls_cert} cannot be used", str(error),
            "PEM files of a certificate and its own key, which no password locks",
            phase="plan", key="api.tls_cert",
        ) from error  # fmt: skip
    return context


def bind(host: str, port: int) -> socket.socket:
    """Take the port without listening yet. Raises StartError when it is taken or the host is not ours."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, proto)
    except OSError as error:
        raise StartError(f"{host} is not an address", str(error), "choose another --host", phase="plan") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.setblocking(False)
    except OSError as error:
        made.close()
        hint = "choose another --port, or stop what uses it"
        raise StartError(f"port {port} on {host} cannot be used", str(error), hint, phase="plan") from error
    return made
