"""The trained miniature `pi05:mini`: reaches coloured targets with a simulated arm. Made by `train/train_arm.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mstar_core.weights.sources import shipped_checkpoint

FOLDER: Final = Path(__file__).parent / "checkpoint" / "mini"


def find_mini(folder: Path) -> Path:
    """Return the folder of `pi05:mini` within the package. Raises WeightsError if the package has no weights for it."""
    return shipped_checkpoint(FOLDER, "pi05:mini")
