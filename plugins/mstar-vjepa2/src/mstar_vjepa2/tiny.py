"""The embedded default checkpoints `vjepa2:tiny` and `vjepa2_ac:tiny`: small, random, the same on every machine.

The first is a classifier in the hub's layout, the second has the official names; what they say means nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mstar_core.weights.sources import generated_checkpoint

VERSION: Final = 1
"""Raised whenever the files that are written change; an older folder is then replaced."""


def write_base(folder: Path) -> Path:
    """Make `folder` hold `vjepa2:tiny`. Returns it; raises StartError when the place cannot be written."""
    return generated_checkpoint(folder, "vjepa2:tiny", VERSION, _write_base)


def write_ac(folder: Path) -> Path:
    """Make `folder` hold `vjepa2_ac:tiny`. Returns it; raises StartError when the place cannot be written."""
    return generated_checkpoint(folder, "vjepa2_ac:tiny", VERSION, _write_ac)


def _write_base(folder: Path) -> None:
    from mstar_vjepa2.checkpoint.tiny_weights import base_files

    base_files(folder)


def _write_ac(folder: Path) -> None:
    from mstar_vjepa2.checkpoint.tiny_weights import ac_files

    ac_files(folder)
