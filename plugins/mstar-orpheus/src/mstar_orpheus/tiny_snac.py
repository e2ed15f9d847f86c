"""Writes the vocoder of the tiny checkpoint: config and a `pytorch_model.bin` in the published key style."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from mstar_orpheus.facts import VQ_STRIDES
from mstar_orpheus.snac import Snac, SnacConfig, decoding_weights
from mstar_orpheus.tiny_lm import CODEBOOK

if TYPE_CHECKING:
    from torch import Tensor

LOUDNESS: Final = 0.15
"""Root mean square of the sound, of full scale 1: audible, far from clipping."""


def write_snac(folder: Path) -> None:
    """Write the folder of the vocoder, as the official repository lays it out."""
    folder.mkdir()
    config = {
        "sampling_rate": 24000, "encoder_dim": 4, "encoder_rates": [2, 4, 8, 8], "decoder_dim": 32,
        "decoder_rates": [8, 8, 4, 2],
        "attn_window_size": None, "codebook_size": CODEBOOK, "codebook_dim": 8, "vq_strides": list(VQ_STRIDES),
        "noise": True,
        "depthwise": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    torch.save(_state(SnacConfig.read(folder / "config.json")), folder / "pytorch_model.bin")


def _state(config: SnacConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(24000)
    shapes = {name: value.shape for name, value in Snac(config).state_dict().items()}
    state: dict[str, Tensor] = {}
    for name, shape in sorted(shapes.items()):
        state |= _random(name, shape, generator)
    state[_gain("decoder.model.7")] *= 1e-3  # measure where tanh is straight
    state[_gain("decoder.model.7")] *= LOUDNESS / _loudness(config, state)
    return state


def _gain(stem: str) -> str:
    return f"{stem}.parametrizations.weight.original0"


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> dict[str, Tensor]:
    value = torch.randn(shape, generator=generator)
    if name.endswith("alpha"):
        return {name: 0.5 + value.abs()}
    if name.endswith("bias"):
        return {name: value * 0.02}
    if name.endswith("codebook.weight"):
        return {name: value}
    stem = name.removesuffix(".weight")
    scale = 0.3 if stem.endswith("linear") else 1.0
    gain = torch.full((shape[0], *[1] * (len(shape) - 1)), scale)
    return {_gain(stem): gain, f"{stem}.parametrizations.weight.original1": value}


@torch.inference_mode()
def _loudness(config: SnacConfig, state: dict[str, Tensor]) -> float:
    """Root mean square of a second of random codes, to three digits, so that the last bits of a machine do not show."""
    snac = Snac(config)
    snac.load_state_dict(decoding_weights(state))
    generator = torch.Generator().manual_seed(0)
    levels = [torch.randint(config.codebook_size, (1, 12 * count), generator=generator) for count in (1, 2, 4)]
    return float(f"{float(snac.decode(levels).square().mean().sqrt()):.3g}")
