"""Self-signed certificates for servers of tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate_in(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 and its key. A client that trusts the certificate trusts the server."""
    folder.mkdir(exist_ok=True)
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(
        [*words, "-addext", "subjectAltName=IP:127.0.0.1", "-out", cert, "-keyout", key],
        check=True,
        capture_output=True,
    )
    return cert, key


def encrypted(key: Path, target: Path) -> Path:
    """Write a key again, encrypted with a password."""
    words = ["openssl", "rsa", "-aes128", "-passout", "pass:word", "-in", key, "-out", target]
    subprocess.run(words, check=True, capture_output=True)
    return target
