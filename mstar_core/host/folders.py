"""Whether a folder can be created and written, found without writing. Used by checks before a start."""

from __future__ import annotations

import os
from pathlib import Path


def obstacle(folder: Path) -> str:
    """Return why this user cannot create or write a folder; empty if nothing known prevents it."""
    existing = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    if not existing.is_dir():
        return f"{existing} is not a directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        facts = existing.stat()
        return (
            f"{existing} belongs to uid {facts.st_uid}, mode {facts.st_mode & 0o7777:o}; this user is uid {os.getuid()}"
        )
    return ""
