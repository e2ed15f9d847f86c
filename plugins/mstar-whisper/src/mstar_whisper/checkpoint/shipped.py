"""The trained miniature `whisper:mini`: writes down what `orpheus:mini` says. Made by `train/`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mstar_core.weights.sources import shipped_checkpoint

FOLDER: Final = Path(__file__).parent / "mini"


def find_mini(folder: Path) -> Path:
    """Return the folder of `whisper:mini` in the package. Raises WeightsError if it has no weights.

    folder: the cache folder, unused.
    """
    return shipped_checkpoint(FOLDER, "whisper:mini")
