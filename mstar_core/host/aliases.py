"""Names of run directories whose deployments replace another one.

Such a directory is hidden and keeps its path for the whole life of its deployment, because processes know their sockets
by path. A symbolic link beside it bears the name: NAME.next during the start, NAME once the old one is gone.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

NEXT: Final = ".next"
MARK: Final = "~"
"""Character before the random part of a hidden directory's name. No deployment's name contains it."""


def hidden_path(named: Path) -> Path:
    """Return a new path for the run directory of the deployment that takes over the name of `named`."""
    return named.with_name(f".{named.name}{MARK}{secrets.token_hex(2)}")


def name_of(path: Path) -> str:
    """Return the name of the deployment whose run directory has this path."""
    return path.name[1:].partition(MARK)[0] if path.name.startswith(".") else path.name


def next_link(hidden: Path) -> Path:
    """Return the path of the link that bears the name while the deployment starts."""
    return hidden.with_name(name_of(hidden) + NEXT)


def target_of(path: Path) -> Path | None:
    """Return the hidden directory that a link names, None for anything else."""
    try:
        target = os.readlink(path)
    except OSError:
        return None
    is_hidden = os.sep not in target and target.startswith(".") and MARK in target
    return path.with_name(target) if is_hidden else None


def links_to(hidden: Path) -> list[Path]:
    """Return the links that name a run directory."""
    try:
        return [path for path in hidden.parent.iterdir() if path.is_symlink() and target_of(path) == hidden]
    except OSError:
        return []
