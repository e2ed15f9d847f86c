"""The embedded default checkpoint `pi05:tiny`: small, random, in openpi's layout, the same on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mstar_core.weights.sources import generated_checkpoint

VERSION: Final = 1
"""Raised whenever the files that are written change; an older folder is then replaced."""


def write_tiny(folder: Path) -> Path:
    """Make `folder` hold the tiny checkpoint. Returns `folder`. Raises StartError when the place cannot be written."""
    return generated_checkpoint(folder, "pi05:tiny", VERSION, _write)


def _write(folder: Path) -> None:
    from mstar_pi05.checkpoint.tiny_files import write_files

    write_files(folder)
