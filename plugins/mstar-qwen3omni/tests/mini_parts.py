"""Modules of `train/` for tests, under a name that no other plugin uses, and made sounds that need no voice."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from mstar_qwen3omni import world

PLUGIN: Final = Path(__file__).parents[1]
SOUNDS: Final = Path(__file__).parent / "mini_sounds.npz"
"""Two new spoken digits of each kind, and the 25 answers in the voice ethan, as `train.sounds` makes them."""


def train(module: str) -> ModuleType:
    """Import a module of `train/`."""
    if "omni_train" not in sys.modules:
        folder = PLUGIN / "train"
        spec = importlib.util.spec_from_file_location(
            "omni_train", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules["omni_train"] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"omni_train.{module}")


def noise_sounds() -> Any:
    """Return random sounds in place of speech, for tests of the training's path."""
    sounds, voices = train("sounds"), train("voices")
    chance = np.random.default_rng(1)
    digits = tuple((index % 10, _noise(chance, 5000)) for index in range(40))
    answers = {(name, word): _noise(chance, 3 * sounds.FRAME) for name in voices.SPEAKERS for word in world.ANSWERS}
    return sounds.Sounds(digits, answers)


def _noise(chance: np.random.Generator, count: int) -> np.ndarray:
    return chance.normal(0, 3000, count).astype(np.int16)
