"""The generated checkpoints `qwen3_tts:tiny` and `qwen3_tts_base:tiny`: small, random, in the official layout.

Their sound is noise. They are identical on every machine, and their speech ends by itself after some dozens of frames.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from mstar_core.weights.sources import generated_checkpoint
from mstar_qwen3tts.checkpoint.config import BASE, CUSTOM

VERSION: Final = 1
"""Version of the generated files. A folder of another version is replaced."""


def write_custom(folder: Path) -> Path:
    """Write `qwen3_tts:tiny` into `folder` and return it. Raises StartError when the folder cannot be written."""
    return generated_checkpoint(folder, "qwen3_tts:tiny", VERSION, partial(_write, CUSTOM))


def write_base(folder: Path) -> Path:
    """Write `qwen3_tts_base:tiny`, as `write_custom` does."""
    return generated_checkpoint(folder, "qwen3_tts_base:tiny", VERSION, partial(_write, BASE))


def _write(kind: str, folder: Path) -> None:
    from mstar_qwen3tts.sources.tiny_files import write_files

    write_files(folder, kind)
