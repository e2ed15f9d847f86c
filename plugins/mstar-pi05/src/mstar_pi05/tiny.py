"""The embedded default checkpoint `pi05:tiny`: small, random, in openpi's layout, the same on every machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mstar_core.errors import StartError

VERSION: Final = 1
"""Raised whenever the files that are written change; an older folder is then replaced."""

STAMP: Final = "tiny.json"


def write_tiny(folder: Path) -> Path:
    """Make `folder` hold the tiny checkpoint, in one step for whoever looks at it. Returns `folder`.

    Does nothing when this version is there. Raises StartError when the place cannot be written.
    """
    if _is_current(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(folder.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed with the file, also when the process dies
            if not _is_current(folder):
                _replace(folder)
    except OSError as error:
        hint = "choose a writable place with --cache-dir"
        raise StartError(f"cannot write the tiny checkpoint to {folder}", str(error), hint, phase="weights") from error
    return folder


def _is_current(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / STAMP).read_text())["version"] == VERSION)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _replace(folder: Path) -> None:
    # Here, not above: a start that finds the checkpoint made already must not wait for torch.
    from mstar_pi05.tiny_files import write_files

    with _scratch(folder) as made:
        write_files(made)
        (made / STAMP).write_text(json.dumps({"model": "pi05:tiny", "version": VERSION}) + "\n")
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
