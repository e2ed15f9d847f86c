"""Certificate and key of the api's port. Checked by `up` before anything starts, and loaded by the api."""

from __future__ import annotations

import ssl

from mstar_core.errors import StartError


def load_certificate(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the TLS context of two PEM files; None without them. Raises StartError if they cannot be used."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise StartError(
            "api.tls_cert and api.tls_key must be set together",
            hint="set both or neither",
            phase="plan",
            key="api.tls_cert",
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password, OpenSSL would prompt on the terminal for the one of an encrypted key.
        context.load_cert_chain(cert, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise StartError(
            f"the certificate {cert} cannot be used",
            str(error),
            "use PEM files of a certificate and its unencrypted key",
            phase="plan",
            key="api.tls_cert",
        ) from error
    return context
