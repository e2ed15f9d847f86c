"""The trained miniature `llm:mini`: simple questions, tool calls and JSON. Made by the command in `train/README.md`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mstar_core.weights.sources import shipped_checkpoint

FOLDER: Final = Path(__file__).parent / "mini"


def find_mini(folder: Path) -> Path:
    """Return the folder of `llm:mini` in the package. Raises WeightsError if it has no weights.

    folder: the cache folder, unused.
    """
    return shipped_checkpoint(FOLDER, "llm:mini")
