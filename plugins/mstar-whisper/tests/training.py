"""The modules of `train/`, under a name that no other plugin uses."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

NAME = "whisper_train"


def train(module: str) -> ModuleType:
    """Import a module of `train/`."""
    if NAME not in sys.modules:
        folder = Path(__file__).parents[1] / "train"
        spec = importlib.util.spec_from_file_location(
            NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{NAME}.{module}")
