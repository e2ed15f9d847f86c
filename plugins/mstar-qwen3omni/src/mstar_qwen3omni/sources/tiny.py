"""The generated checkpoint `qwen3_omni:tiny`: small, random, in the official layout, identical on every machine.

Its text and sound are noise. Its weights make everything else behave like the real model: text consists of printable
characters, and text and speech end by themselves after some dozens of steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mstar_core.weights.sources import generated_checkpoint

VERSION: Final = 1
"""Version of the generated files. A folder of another version is replaced."""


def write_tiny(folder: Path) -> Path:
    """Write `qwen3_omni:tiny` into `folder` and return it. Raises StartError when the folder cannot be written."""
    return generated_checkpoint(folder, "qwen3_omni:tiny", VERSION, _write)


def _write(folder: Path) -> None:
    from mstar_qwen3omni.sources.tiny_files import write_files

    write_files(folder)
