"""Generated checkpoints `:tiny` of all variants: small, random, equal on every machine."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.weights.sources import generated_checkpoint
from mstar_wan22.checkpoint.config import (
    A14B,
    MEAN_16,
    MEAN_48,
    STD_16,
    STD_48,
    Sizes,
    TextSizes,
    TransformerSizes,
    VaeSizes,
)

if TYPE_CHECKING:
    from torch import Generator, Tensor

VERSION: Final = 2
"""Incremented when the written files change, which replaces older folders."""

SEED: Final = 2026
WORDS: Final = ("a", "the", "of", "and", "cat", "lake", "red", "walks")
VOCAB: Final = 128

TEXT: Final = TextSizes(width=32, head_dim=8, inner=48, layers=2, heads=4, vocab=VOCAB)
NET: Final = TransformerSizes(heads=4, head_dim=12, layers=2, inner=64, text=32, frequencies=32, inputs=8, outputs=8)
BASE: Final = Sizes(
    text=TEXT,
    transformer=NET,
    vae=VaeSizes(base=4, decoder_base=4, channels=8, blocks=1, mean=MEAN_48[:8], std=STD_48[:8]),
)
EXPERTS: Final = replace(
    A14B,
    text=TEXT,
    transformer=replace(NET, inputs=4, outputs=4),
    vae=VaeSizes(
        base=4, decoder_base=4, channels=4, blocks=1, is_residual=False, fold=1, mean=MEAN_16[:4], std=STD_16[:4]
    ),
)
ANIMATED: Final = replace(EXPERTS, transformer=replace(EXPERTS.transformer, inputs=12), boundary=0.9, takes_image=True)


def write_wan22(folder: Path) -> Path:
    """Write `wan22:tiny` to `folder` and return it. Raises StartError if it cannot be written."""
    return _written(folder, "wan22", BASE)


def write_wan22_a14b(folder: Path) -> Path:
    """Write `wan22_a14b:tiny` to `folder` and return it, as `write_wan22`."""
    return _written(folder, "wan22_a14b", EXPERTS)


def write_wan22_i2v_a14b(folder: Path) -> Path:
    """Write `wan22_i2v_a14b:tiny` to `folder` and return it, as `write_wan22`."""
    return _written(folder, "wan22_i2v_a14b", ANIMATED)


def _written(folder: Path, name: str, sizes: Sizes) -> Path:
    return generated_checkpoint(folder, f"{name}:tiny", VERSION, lambda empty: write_random(empty, sizes))


def write_random(folder: Path, sizes: Sizes) -> None:
    """Write a checkpoint of random weights. torch is imported only here."""
    import torch

    from mstar_wan22.sources.layout import shapes, write_configs, write_weights

    generator = torch.Generator().manual_seed(SEED)
    write_configs(folder, sizes, WORDS)
    drawn = {
        part: {name: _drawn(name, shape, generator) for name, shape in sorted(named.items())}
        for part, named in shapes(sizes).items()
    }
    write_weights(folder, drawn)


def _drawn(name: str, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Return random values under which every part has an effect."""
    import torch

    value: Tensor = torch.randn(shape, generator=generator)
    if "gamma" in name or ("norm" in name and name.endswith("weight")):
        return 1 + 0.1 * value
    if name.endswith("bias"):
        return 0.1 * value
    if name.endswith(("scale_shift_table", "relative_attention_bias.weight")):
        return 0.5 * value
    if name == "shared.weight":
        return value
    return value / math.sqrt(math.prod(shape[1:]))
