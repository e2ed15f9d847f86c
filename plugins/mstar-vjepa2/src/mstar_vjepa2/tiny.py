"""The embedded default checkpoints `vjepa2:tiny` and `vjepa2_ac:tiny`: small, random, the same on every machine.

The first is a classifier in the hub's layout, the second has the official names; what they say means nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from mstar_core.errors import StartError

VERSION: Final = 1
"""Raised whenever the files that are written change; an older folder is then replaced."""

STAMP: Final = "tiny.json"


def write_base(folder: Path) -> Path:
    """Make `folder` hold `vjepa2:tiny`. Returns it; raises StartError when the place cannot be written."""

    def write(made: Path) -> None:
        from mstar_vjepa2.tiny_weights import base_files  # here, so that a start that finds it waits for no torch

        base_files(made)

    return _written(folder, "vjepa2:tiny", write)


def write_ac(folder: Path) -> Path:
    """Make `folder` hold `vjepa2_ac:tiny`. Returns it; raises StartError when the place cannot be written."""

    def write(made: Path) -> None:
        from mstar_vjepa2.tiny_weights import ac_files

        ac_files(made)

    return _written(folder, "vjepa2_ac:tiny", write)


def _written(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """In one step for whoever looks at it; nothing is done when this version is there."""
    if _is_current(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(folder.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed with the file, also when the process dies
            if not _is_current(folder):
                _replace(folder, name, write)
    except OSError as error:
        hint = "choose a writable place with --cache-dir"
        raise StartError(f"cannot write the tiny checkpoint to {folder}", str(error), hint, phase="weights") from error
    return folder


def _is_current(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / STAMP).read_text())["version"] == VERSION)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _replace(folder: Path, name: str, write: Callable[[Path], None]) -> None:
    with _scratch(folder) as made:
        write(made)
        (made / STAMP).write_text(json.dumps({"model": name, "version": VERSION}) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(made, folder)


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder beside `folder`, gone afterwards unless it was renamed."""
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    made.chmod(0o755)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
