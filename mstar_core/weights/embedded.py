"""Checkpoints that a plugin makes itself: written once per version, in one step for whoever looks at the folder."""

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

STAMP: Final = "tiny.json"
"""The file that says which checkpoint a folder holds, and which version of it."""


def embedded_checkpoint(folder: Path, name: str, version: int, write: Callable[[Path], None]) -> Path:
    """Make `folder` hold the checkpoint `name` in this version. Returns `folder`.

    write: fills an empty folder; it is not called when the version is there already, so that it should import what it
    needs (torch) itself. Several processes may ask at once: one writes, the others wait and find it. A folder of
    another version is replaced. Raises StartError when the place cannot be written.
    """
    if _is_current(folder, version):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(folder.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed with the file, also when the process dies
            if not _is_current(folder, version):
                _replace(folder, {"model": name, "version": version}, write)
    except OSError as error:
        hint = "choose a writable place with --cache-dir"
        raise StartError(
            f"cannot write the checkpoint {name} to {folder}", str(error), hint, phase="weights"
        ) from error
    return folder


def _is_current(folder: Path, version: int) -> bool:
    try:
        return bool(json.loads((folder / STAMP).read_text())["version"] == version)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _replace(folder: Path, stamp: dict[str, object], write: Callable[[Path], None]) -> None:
    with _scratch(folder) as made:
        write(made)
        (made / STAMP).write_text(json.dumps(stamp) + "\n")
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
