"""Fingerprint of a checkpoint folder, by which hosts compare their weights without reading all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json", ".txt", ".model", ".jinja")
"""Files that a model reads. Others, such as a README, may differ."""

HEAD_BYTES: Final = 1 << 20
"""Bytes read from the beginning of each file: all of a small one, and the header of a safetensors file."""

BLOCKS: Final = 16
BLOCK_BYTES: Final = 4096
"""Blocks read from the rest of a large file, spread evenly: weights of the same shapes differ in them."""


def fingerprint(folder: Path) -> str:
    """Return a hash of the names, sizes, beginnings and samples of the files that a model reads."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(_files(folder)):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(HEAD_BYTES))
            for number in range(BLOCKS if size > HEAD_BYTES else 0):
                file.seek(HEAD_BYTES + (size - HEAD_BYTES - BLOCK_BYTES) * number // (BLOCKS - 1), os.SEEK_SET)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith(SUFFIXES) and not name.startswith("."):
                yield Path(parent) / name
