"""The generated checkpoints `vjepa2:tiny` and `vjepa2_ac:tiny`: small, random, identical on every machine.

`vjepa2:tiny` is a classifier in the hub's layout; `vjepa2_ac:tiny` has the official names. torch is imported only when
files are written, because most starts find them on the disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mstar_core.weights.sources import generated_checkpoint
from mstar_vjepa2.checkpoint.config import CONFIG, read_action, read_base
from mstar_vjepa2.checkpoint.files import WHOLE

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from mstar_vjepa2.published import PublishedWeights

VERSION: Final = 1
"""Version of the generated files. A folder of an older version is replaced."""

ENCODER: Final[Mapping[str, Any]] = {
    "crop_size": 32,
    "patch_size": 8,
    "tubelet_size": 2,
    "frames_per_clip": 8,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "mlp_ratio": 4.0,
    "layer_norm_eps": 1e-6,
}
BASE_CONFIG: Final[Mapping[str, Any]] = {
    **ENCODER,
    "model_type": "vjepa2",
    "architectures": ["VJEPA2ForVideoClassification"],
    "in_chans": 3,
    "hidden_act": "gelu",
    "qkv_bias": True,
    "num_pooler_layers": 1,
    "pred_hidden_size": 36,
    "pred_num_attention_heads": 3,
    "pred_num_hidden_layers": 2,
    "pred_num_mask_tokens": 10,
    "pred_mlp_ratio": 4.0,
    "id2label": {"0": "falling", "1": "lifting", "2": "pushing", "3": "turning"},
}
AC_CONFIG: Final[Mapping[str, Any]] = {
    "model_type": "vjepa2_ac",
    "encoder": dict(ENCODER),
    "ac_predictor": {
        "embed_dim": 48,
        "predictor_embed_dim": 36,
        "depth": 2,
        "num_heads": 3,
        "mlp_ratio": 4.0,
        "action_embed_dim": 7,
        "use_extrinsics": False,
        "max_latent_frames": 32,
    },
}
GAINS: Final = {"action_encoder": 12.0, "state_encoder": 1.5}
"""Actions and states are small numbers. These gains give them the influence that they have on trained weights."""


def write_base(folder: Path) -> Path:
    """Write `vjepa2:tiny` into `folder` and return it. Raises StartError when the folder cannot be written."""
    return generated_checkpoint(folder, "vjepa2:tiny", VERSION, _write_base)


def write_ac(folder: Path) -> Path:
    """Write `vjepa2_ac:tiny` into `folder` and return it. Raises StartError when the folder cannot be written."""
    return generated_checkpoint(folder, "vjepa2_ac:tiny", VERSION, _write_ac)


def _write_base(folder: Path) -> None:
    from mstar_vjepa2.published import base_weights

    _write_config(folder, BASE_CONFIG)
    _write_weights(folder, base_weights(read_base(folder)), seed=2)


def _write_ac(folder: Path) -> None:
    from mstar_vjepa2.published import action_weights

    _write_config(folder, AC_CONFIG)
    _write_weights(folder, action_weights(read_action(folder)), seed=3)


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _write_weights(folder: Path, published: PublishedWeights, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {name: _random(name, shape, generator) for name, shape in published.shapes().items()}
    save_file(weights, folder / WHOLE, metadata={"format": "pt"})


def _random(name: str, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Draw a tensor: norms near 1, biases near 0, matrices that preserve the scale of their inputs."""
    import torch

    value: Tensor = torch.randn(shape, generator=generator)
    stem, _, kind = name.rpartition(".")
    if kind == "bias":
        return 0.1 * value
    if kind in ("mask_tokens", "query_tokens"):
        return value
    if len(shape) == 1:
        return 1 + 0.2 * value
    return value * GAINS.get(stem.rpartition(".")[2], 1.0) / math.sqrt(math.prod(shape[1:]))
