"""Generated checkpoint `orpheus:tiny`: small, random, in the official layout, equal on every machine.

Its sound is noise. Its weights make everything else behave like the real model: audio ids come in slot order, and
speech ends by itself after a time that grows with the length of the text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mstar_core.weights.sources import generated_checkpoint

VERSION: Final = 1
"""Incremented when the written files change, which replaces older folders."""


def write_tiny(folder: Path) -> Path:
    """Write the tiny checkpoint to `folder`. Returns `folder`. Raises StartError if it cannot be written."""
    return generated_checkpoint(folder, "orpheus:tiny", VERSION, _write)


def _write(folder: Path) -> None:
    from mstar_orpheus.sources.tiny_weights import write_lm, write_snac

    write_lm(folder / "lm")
    write_snac(folder / "snac")
