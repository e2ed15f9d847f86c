"""Record of one gateway: its configuration and folders. Written by `mstarctl serve`, read by its processes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from mstar_core.gateway.serve_file import ServeFile


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway as its processes read it.

    log_dir: of this start. state_dir: kept between starts, for usage and for what restarts continue with.
    """

    name: str
    run_dir: str
    log_dir: str
    state_dir: str
    serve: ServeFile
    log_level: str = "INFO"
    argv: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """The gateway's URL for a client on this host."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.serve.host, self.serve.host)
        scheme = "http" if self.serve.tls_cert is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.serve.port}"

    def encode(self) -> bytes:
        """Encode as JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def load(cls, path: Path) -> GatewaySpec:
        """Read a record. Raises OSError, and msgspec.ValidationError if another version wrote it."""
        return msgspec.json.decode(path.read_bytes(), type=cls)
