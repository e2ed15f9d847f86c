"""Modules and vectors of the encoder and vocoder tests: from the golden set, and small random ones."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mstar_core.layers import Checkpoint
from mstar_core.weights.building import building
from mstar_qwen3omni.checkpoint.config import AudioSizes, OmniConfig, VisionSizes, VocoderSizes, read_config
from mstar_qwen3omni.checkpoint.weights import load, own_tensors
from mstar_qwen3omni.encoders.audio import AudioEncoder
from mstar_qwen3omni.encoders.vision import VisionEncoder
from mstar_qwen3omni.vocoder.code2wav import Code2Wav

from .golden_set import golden_folder

FOLDER: Final = golden_folder()

CLASSES: Final = {"audio_encoder": AudioEncoder, "vision_encoder": VisionEncoder, "Code2Wav": Code2Wav}

SMALL: Final = OmniConfig(
    groups=4,
    audio=AudioSizes(width=32, layers=2, heads=2, mlp=48, window=200, channels=4, output=24),
    vision=VisionSizes(width=32, layers=3, heads=2, mlp=48, positions=64, output=24, deepstack=(0, 1)),
    vocoder=VocoderSizes(
        codebook=16,
        groups=4,
        width=32,
        layers=2,
        heads=2,
        kv_heads=2,
        head_dim=16,
        mlp=48,
        window=5,
        decoder=32,
        rates=(4, 3),
        ratios=(2,),
    ),
)
"""Small sizes, with the released ids."""

needs_weights = pytest.mark.skipif(
    not (FOLDER / "model.safetensors").is_file(), reason="needs the golden set with its weights in MSTAR_GOLDEN"
)


@cache
def reference(node: str) -> Any:
    """Return a node with the weights of the golden set, the same object on every call."""
    return loaded(node)


def loaded(node: str) -> Any:
    """Return a new node with the weights of the golden set."""
    with building(torch.device("cpu"), torch.float32):
        module: nn.Module = CLASSES[node](read_config(FOLDER))
    load(module, own_tensors(Checkpoint.find(FOLDER), node), node, None)
    return module.eval().requires_grad_(False)


def small(node: str, config: OmniConfig = SMALL) -> Any:
    """Return a node with random weights, the same on every call."""
    made = torch.Generator().manual_seed(7)
    module: nn.Module = CLASSES[node](config).eval().requires_grad_(False)
    for name, weight in module.named_parameters():
        is_factor = weight.dim() == 1 and not name.endswith("bias")
        gain = 0.5 if name.startswith("decoder") else 1.5  # samples stay within their range
        spread = 0.1 if weight.dim() == 1 else gain / (weight[0].numel() ** 0.5)
        weight.copy_(torch.randn(weight.shape, generator=made) * spread + float(is_factor and "norm" in name))
    return module


@cache
def vectors(name: str) -> dict[str, Tensor]:
    """Return the tensors of a file of the set. Skips the test if the set lacks it."""
    path = FOLDER / f"{name}.safetensors"
    if not path.is_file():
        pytest.skip(f"{path.name} is not part of this golden set; MSTAR_GOLDEN names the whole one")
    return load_file(path)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """Return normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
