"""TLS settings of clients that use none: httpx reads the certificates of all authorities otherwise, 17 ms a client."""

from __future__ import annotations

import ssl
from typing import Final

NO_AUTHORITIES: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts no certificate."""
