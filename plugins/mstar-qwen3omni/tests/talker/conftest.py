"""Fixtures of the talker's tests. MSTAR_GOLDEN: a root that holds `qwen3_omni/`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mstar_qwen3omni.checkpoint.config import OmniConfig, read_config
from mstar_qwen3omni.talker.talker import Talker

from .driver import CASES, FOLDER, HAS_WEIGHTS, Case, load_talker, read_case


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def config() -> OmniConfig:
    """Sizes and ids of the set."""
    if not HAS_WEIGHTS:
        pytest.skip("needs the golden set in MSTAR_GOLDEN")
    return read_config(FOLDER)


@pytest.fixture(scope="session")
def talker(config: OmniConfig) -> Talker:
    """The talker with the weights of the set, on the CPU in float32."""
    return load_talker(FOLDER)


@pytest.fixture(params=CASES or ["none"])
def case(request: pytest.FixtureRequest, config: OmniConfig) -> Case:
    """Each case of the set."""
    return read_case(request.param, config)
