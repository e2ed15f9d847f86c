"""Folder of the golden vectors. The weights of the plugin's own part are drawn again, because they exceed its size.

The reference model has random weights: one CPU generator, parameters in a fixed order, normal numbers times
`numerator / sqrt(fan_in)` plus an offset. `golden/weights.json` lists them, with a digest of the results.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

OWN: Final = Path(__file__).parent / "golden"
RECIPE: Final = OWN / "weights.json"
BUILT: Final = Path(__file__).parents[3] / "build" / "golden"
WEIGHTS: Final = "model.safetensors"


@functools.cache
def golden_folder() -> Path:
    """Return the set of MSTAR_GOLDEN, or the plugin's own with weights.

    The own set has no weights if this version of torch draws other numbers; tests that need them are then skipped.
    """
    root = os.environ.get("MSTAR_GOLDEN")
    if root:
        return Path(root) / "qwen3_omni"
    recipe = json.loads(RECIPE.read_text())
    folder = BUILT / f"qwen3_omni-{recipe['sha256'][:16]}"
    if folder.is_dir():
        return folder
    tensors = dict(drawn(recipe))
    return built(folder, tensors) if digest(tensors) == recipe["sha256"] else OWN


@functools.cache
def golden_settings() -> dict[str, Any]:
    """Return the settings of the set: its voice, and the windows of its chunked waveform in frames."""
    settings: dict[str, Any] = json.loads((golden_folder() / "settings.json").read_text())
    return settings


def drawn(recipe: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Draw the weights under their names in the checkpoint."""
    generator = torch.Generator().manual_seed(recipe["seed"])
    for name, shape, numerator, fan_in, offset in recipe["tensors"]:
        value = torch.randn(shape, generator=generator) * numerator / math.sqrt(fan_in)
        yield from unfused(name, value + offset if offset else value)


def unfused(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split fused experts, [experts, rows, columns], into one matrix each."""
    folder, _, last = name.rpartition(".")
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
    if not names:
        yield name, value
        return
    for number, expert in enumerate(value):
        for part, matrix in zip(names, expert.chunk(len(names)), strict=True):
            yield f"{folder}.{number}.{part}.weight", matrix.clone()


def digest(tensors: dict[str, Tensor]) -> str:
    """Return a digest of names and values."""
    made = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        made.update(name.encode())
        made.update(value.contiguous().numpy().tobytes())
    return made.hexdigest()


def built(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Write the whole set into a folder, which appears complete or not at all."""
    BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as made:
        new = Path(made) / "set"
        new.mkdir()
        save_file(tensors, new / WEIGHTS)
        for file in OWN.iterdir():
            (new / file.name).symlink_to(file)
        try:
            new.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder
