"""Token by which a gateway knows the deployments that it, or a gateway before it, has started.

It goes into the record of each deployment at its start. So a kill of the gateway at any moment leaves no claim on what
an operator starts later under the same name, and a successor that it had just started is known as its own.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

FILE = "owner"


def owner_token(state_dir: Path) -> str:
    """Return the token of the gateways that use a folder, one after the other; the first one draws it.

    During a rolling restart two workers read it.
    """
    path = state_dir / FILE
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        fresh = state_dir / f"{FILE}.{os.getpid()}"
        fresh.write_text(secrets.token_hex(8))
        with suppress(FileExistsError):
            os.link(fresh, path)  # whole or not at all, and never instead of an earlier one
        fresh.unlink()
    return path.read_text()
