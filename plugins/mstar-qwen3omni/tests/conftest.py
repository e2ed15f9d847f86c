"""Golden vectors for the tests. MSTAR_GOLDEN selects another set: a folder with `qwen3_omni/`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from safetensors.numpy import load_file

from mstar_qwen3omni.checkpoint.config import OmniConfig, read_config

from .golden_set import golden_folder, golden_settings

# As in the root's tests: examples are the same in each run, and a slow moment of the host fails nothing.
settings.register_profile(
    "shared-host", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.load_profile("shared-host")

CASES = tuple(sorted(path.stem.removeprefix("case_") for path in golden_folder().glob("case_*.safetensors")))
"""Cases of the set. The plugin's own folder holds some of those of the whole set."""


@dataclass(frozen=True)
class Golden:
    """One set of reference vectors. Every size, length and id comes from its files."""

    folder: Path

    @classmethod
    def find(cls) -> Golden:
        """Return the set of MSTAR_GOLDEN, or the one beside the tests."""
        return cls(golden_folder())

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    @property
    def voice(self) -> str:
        """Voice of the set's sound."""
        return str(golden_settings()["voice"])

    @cached_property
    def config(self) -> OmniConfig:
        """Sizes and ids of the set's checkpoint."""
        return read_config(self.folder)

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        """Return the tensors of a file. Skips the test if the set lacks it."""
        path = self.folder / f"{name}.safetensors"
        if not path.is_file():
            pytest.skip(f"{path.name} is not part of this golden set; MSTAR_GOLDEN names the whole one")
        return load_file(path)

    def case(self, name: str) -> dict[str, np.ndarray]:
        """Return inputs (`in.*`) and expected outputs of a case. Skips the test if the set lacks it."""
        return self.tensors(f"case_{name}")


GOLDEN = Golden.find()


@pytest.fixture(scope="session")
def golden() -> Golden:
    return GOLDEN


@pytest.fixture(params=CASES)
def case_name(request: pytest.FixtureRequest) -> str:
    """Name of each case."""
    return str(request.param)
