"""The trained miniature `wan22:mini`: moves a drawn shape in a named direction. Made by `train/train_moves.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mstar_core.weights.sources import shipped_checkpoint

FOLDER: Final = Path(__file__).parents[1] / "checkpoint" / "mini"


def find_mini(folder: Path) -> Path:
    """Return the folder of `wan22:mini` in the package. Raises WeightsError if it has no weights."""
    return shipped_checkpoint(FOLDER, "wan22:mini", "transformer/diffusion_pytorch_model.safetensors")
