"""Declared sizes of weights, held to modules in the official shapes on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import nn

from mstar_bagel.checkpoint.config import Sizes as BagelSizes
from mstar_bagel.nodes.autoencoder import CleanLatents, Pixels
from mstar_bagel.nodes.language import BagelLLM
from mstar_bagel.nodes.vision import ImageFeatures
from mstar_pi05.checkpoint.config import Sizes as PolicySizes
from mstar_pi05.model import Cameras, Policy
from mstar_qwen3omni.checkpoint.config import OmniConfig
from mstar_qwen3omni.model import MODULES, new_module
from mstar_vjepa2.published import RELEASED_AC, action_weights
from mstarctl.plugins import Plugins

TOLERANCE = 0.01
WORLD_MODEL = ("video_encoder", "ac_predictor")
Case = tuple[str, str, int, Callable[[], nn.Module]]


def cases() -> Iterator[Case]:
    """Yield (model, node, bytes of an element, builder)."""
    image = BagelSizes()
    yield "bagel", "LLM", 2, lambda: BagelLLM(image)
    yield "bagel", "vit_encoder", 2, lambda: ImageFeatures(image)
    yield "bagel", "vae_encoder", 4, lambda: CleanLatents(image)
    yield "bagel", "vae_decoder", 4, lambda: Pixels(image)
    yield from (("qwen3_omni", name, 2, lambda name=name: new_module(name, OmniConfig())) for name in MODULES)
    yield "pi05", "LLM", 2, lambda: Policy(PolicySizes(), 32)
    yield "pi05", "vit_encoder", 4, lambda: Cameras(PolicySizes(), rounds=False)
    yield from (("vjepa2_ac", name, 2, lambda name=name: world_model()[name]) for name in WORLD_MODEL)


@cache  # it computes tables for a second
def world_model() -> dict[str, nn.Module]:
    """Return the modules of the world model's released weights."""
    with torch.device("cpu"):
        return {name: module for name, (module, _) in action_weights(RELEASED_AC).nodes.items()}


@pytest.mark.parametrize(
    ("model", "node", "width", "build"), list(cases()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_node_declares_the_size_of_its_official_weights(
    model: str, node: str, width: int, build: Callable[[], nn.Module]
) -> None:
    with torch.device("meta"):
        module = build()
    size = sum(parameter.numel() for parameter in module.parameters()) * width
    assert Plugins.discover().model(model).node(node).weight_bytes == pytest.approx(size, rel=TOLERANCE)


def test_every_module_of_the_world_model_is_compared() -> None:
    assert tuple(world_model()) == WORLD_MODEL
