"""The trained miniature `vjepa2_ac:mini`: predicts and plans the way of a block. Made by `train/train_block.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mstar_core.weights.sources import shipped_checkpoint

FOLDER: Final = Path(__file__).parent / "checkpoint" / "mini"


def find_mini(folder: Path) -> Path:
    """Return the folder of `vjepa2_ac:mini` in the package. Raises WeightsError if it has no weights."""
    return shipped_checkpoint(FOLDER, "vjepa2_ac:mini")
