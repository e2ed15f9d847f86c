"""The embedded default checkpoint `orpheus:tiny`: small, random, in the official layout, the same on every machine.

What it says is noise. Its weights are arranged so that everything else behaves as in the real model: audio ids come
in slot order, and speech ends by itself after a time that grows with the length of the text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mstar_core.weights.sources import generated_checkpoint

VERSION: Final = 1
"""Raised whenever the files that are written change; an older folder is then replaced."""


def write_tiny(folder: Path) -> Path:
    """Make `folder` hold the tiny checkpoint. Returns `folder`. Raises StartError when the place cannot be written."""
    return generated_checkpoint(folder, "orpheus:tiny", VERSION, _write)


def _write(folder: Path) -> None:
    from mstar_orpheus.checkpoint.tiny_weights import write_lm, write_snac

    write_lm(folder / "lm")
    write_snac(folder / "snac")
