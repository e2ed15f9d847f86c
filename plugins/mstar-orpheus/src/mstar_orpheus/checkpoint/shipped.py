"""The trained miniature `orpheus:mini`: speaks simple English. Made by the commands in `train/README.md`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mstar_core.weights.sources import shipped_checkpoint

FOLDER: Final = Path(__file__).parent / "mini"
"""Folder with `lm` and `snac`."""


def find_mini(folder: Path) -> Path:
    """Return the folder of `orpheus:mini` in the package. Raises WeightsError if it has no weights.

    folder: the cache folder, unused.
    """
    return shipped_checkpoint(FOLDER / "lm", "orpheus:mini").parent
