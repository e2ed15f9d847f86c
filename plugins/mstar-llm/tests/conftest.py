"""The tiny checkpoint, and a processor of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_llm.processor import Processor
from mstar_llm.sources.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "llm")


@pytest.fixture(scope="session")
def processor(tiny_folder: Path) -> Processor:
    return Processor(tiny_folder, {})
