"""Sizes of a Pi0.5 checkpoint, of which graph, processor and model are made. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

ACTION_WIDTH: Final = 32
"""Values per action step inside the model, and most values of a state."""

CAMERAS: Final = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""The model's places for cameras, in the order of the prefix."""


IMAGE: Final = -1
"""Id in the prefix where a camera's vector stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """One of the two transformers. They share layers, kv_heads and head_dim, since one reads the other's cache."""

    width: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The image tower (SigLIP). image_size, patch_size: pixels."""

    width: int = 1152
    layers: int = 27
    heads: int = 16
    mlp: int = 4304
    image_size: int = 224
    patch_size: int = 14

    @property
    def tokens(self) -> int:
        """Prefix positions of one camera."""
        return (self.image_size // self.patch_size) ** 2


VARIANTS: Final[Mapping[str, Tower]] = {
    "gemma_2b": Tower(width=2048, layers=18, mlp=16384, heads=8, kv_heads=1, head_dim=256),
    "gemma_300m": Tower(width=1024, layers=18, mlp=4096, heads=8, kv_heads=1, head_dim=256),
}
"""Towers that released config files name instead of giving sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is built for one checkpoint and one horizon. Defaults: lerobot/pi05_base.

    prompt_ids: most ids of a prompt. horizon: action steps of an answer. Periods: of the flow time's embedding.
    """

    vocab: int = 257152
    prompt_ids: int = 200
    horizon: int = 50
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    layer_norm_eps: float = 1e-6
    min_period: float = 4e-3
    max_period: float = 4.0
    vision: Vision = field(default_factory=Vision)
    language: Tower = VARIANTS["gemma_2b"]
    expert: Tower = VARIANTS["gemma_300m"]


def fitted(sizes: Sizes, horizon: int | None) -> Sizes:
    """The sizes with a deployment's horizon, where it has one of its own."""
    return sizes if horizon is None else replace(sizes, horizon=horizon)
