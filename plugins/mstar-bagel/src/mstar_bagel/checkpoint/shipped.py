"""The trained miniature `bagel:mini`: draws, describes and recolours shapes. Made by `train/train_shapes.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mstar_bagel.checkpoint.config import MODEL_FILE
from mstar_core.weights.sources import shipped_checkpoint

FOLDER: Final = Path(__file__).parent / "mini"


def find_mini(folder: Path) -> Path:
    """Return the folder of `bagel:mini` in the package. Raises WeightsError if it has no weights.

    folder: the cache folder, unused.
    """
    return shipped_checkpoint(FOLDER, "bagel:mini", MODEL_FILE)
