"""Generated checkpoint `bagel:tiny`: small, random, in the official layout, equal on every machine.

Its images and words are noise. Its weights make everything else behave like the real model: text is readable ASCII and
ends by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mstar_core.weights.sources import generated_checkpoint

VERSION: Final = 1
"""Incremented when the written files change, which replaces older folders."""


def write_tiny(folder: Path) -> Path:
    """Write the tiny checkpoint to `folder` and return it. Raises StartError if it cannot be written."""
    return generated_checkpoint(folder, "bagel:tiny", VERSION, _write)


def _write(folder: Path) -> None:
    from mstar_bagel.sources.tiny_weights import write_files  # torch is imported only to write the files

    write_files(folder)
