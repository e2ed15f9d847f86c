"""Weight files of a checkpoint folder and the tensor names in them. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from mstar_core.errors import WeightsError

INDEX: Final = "model.safetensors.index.json"
WHOLE: Final = "model.safetensors"
TORCH: Final = "*.pt"
CLASSIFIER: Final = "vjepa2."
"""Prefix of encoder and predictor names in classifier files."""

POOLER: Final = "pooler.query_tokens"
_HEADER_LIMIT: Final = 100_000_000


def weight_file(folder: Path) -> Path:
    """Return the file that a checkpoint's weights start from: an index, one safetensors file, or one official .pt.

    Raises WeightsError naming the files that were looked for.
    """
    for name in (INDEX, WHOLE):
        if (folder / name).is_file():
            return folder / name
    looked = [INDEX, WHOLE, TORCH]
    paths = sorted(folder.glob(TORCH))
    if len(paths) == 1:
        return paths[0]
    detail = f"looked for {', '.join(looked)}"
    if paths:
        detail = f"{len(paths)} .pt files: {', '.join(path.name for path in paths)}"
    raise WeightsError(
        f"{folder} must contain one set of weights",
        detail,
        "give the folder of one checkpoint with --weights DIR",
        file=str(folder),
        looked=looked,
    )


def has_pooler(folder: Path) -> bool:
    """Whether the checkpoint in `folder` is a classifier. Decided by tensor names; no tensor is read."""
    path = weight_file(folder)
    if path.name == INDEX:
        return POOLER in _names(_json(path).get("weight_map"))
    return path.name == WHOLE and POOLER in _header(path)


def _json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read", str(error), "fetch it again", file=str(path)) from error
    return value if isinstance(value, dict) else {}


def _header(path: Path) -> dict[str, object]:
    """Return the header of a safetensors file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(path.stat().st_size, _HEADER_LIMIT):
                raise ValueError("it is truncated or not a safetensors file")
            value = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read", str(error), "fetch it again", file=str(path)) from error
    return value if isinstance(value, dict) else {}


def _names(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}
