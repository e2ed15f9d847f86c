"""TCP and RDMA between hosts. This version refuses them and says so; it never falls back to another way."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from mstar_core.errors import TransportError

# All three install the import name `mooncake`, so only one may be there at a time.
DISTRIBUTIONS = {
    "mooncake-transfer-engine": "CUDA 12",
    "mooncake-transfer-engine-cuda13": "CUDA 13",
    "mooncake-transfer-engine-non-cuda": "no CUDA, TCP only",
}


def open_tcp(name: str, incarnation: int, directory: Path) -> NoReturn:
    """Raise TransportError: tensors do not move by TCP in this version."""
    _refuse("TCP")


def open_rdma(name: str, incarnation: int, directory: Path) -> NoReturn:
    """Raise TransportError: tensors do not move by RDMA in this version."""
    _refuse("RDMA")


def _refuse(protocol: str) -> NoReturn:
    choices = ", ".join(f"{name} ({use})" for name, use in DISTRIBUTIONS.items())
    raise TransportError(
        f"tensors do not move by {protocol} in this version",
        f"between hosts they need the Mooncake transfer engine, which is not used yet: one of {choices}",
        "use --tensor-comm-protocol SHM, with all ranks on one host",
    )
