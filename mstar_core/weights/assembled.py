"""One folder out of several places, by links: every process of a deployment is given a single path for its weights."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mstar_core.errors import WeightsError


def assembled(links: Mapping[str, Path], parent: Path) -> Path:
    """A folder in `parent` with a link of each name to its path, made in one step, the same for the same links.

    Raises WeightsError when the place cannot be written.
    """
    told = "\n".join(f"{name}\t{path.resolve()}" for name, path in sorted(links.items()))
    folder = parent / hashlib.sha256(told.encode()).hexdigest()[:16]
    try:
        if not folder.exists():
            parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=".", dir=parent))
            for name, path in links.items():
                (made / name).symlink_to(path.resolve())
            _take_place(made, folder)
    except OSError as error:
        raise WeightsError(
            f"cannot write {folder}", str(error), "choose a writable place with --cache-dir DIR", file=str(folder)
        ) from error
    return folder


def _take_place(made: Path, folder: Path) -> None:
    try:
        os.rename(made, folder)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not folder.exists():  # else another process was first: its folder says the same
            raise
