"""Files of the tiny checkpoints: a config, and random weights under published names."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import save_file

from mstar_vjepa2.checkpoint.config import CONFIG
from mstar_vjepa2.checkpoint.files import WHOLE
from mstar_vjepa2.checkpoint.names import hub_names, official_ac_names, plain
from mstar_vjepa2.params import POSE

if TYPE_CHECKING:
    from torch import Tensor

WIDTH: Final = 48
PREDICTOR_WIDTH: Final = 36
PATCH: Final = 8
LABELS: Final = ("falling", "lifting", "pushing", "turning")
ENCODER: Final[Mapping[str, Any]] = {
    "crop_size": 32, "patch_size": PATCH, "tubelet_size": 2, "frames_per_clip": 8, "hidden_size": WIDTH,
    "num_attention_heads": 3, "num_hidden_layers": 2, "mlp_ratio": 4.0, "layer_norm_eps": 1e-6,
}  # fmt: skip
BASE_CONFIG: Final[Mapping[str, Any]] = {
    **ENCODER, "model_type": "vjepa2", "architectures": ["VJEPA2ForVideoClassification"], "in_chans": 3,
    "hidden_act": "gelu", "qkv_bias": True, "num_pooler_layers": 1, "pred_hidden_size": PREDICTOR_WIDTH,
    "pred_num_attention_heads": 3, "pred_num_hidden_layers": 2, "pred_num_mask_tokens": 10, "pred_mlp_ratio": 4.0,
    "id2label": {str(index): label for index, label in enumerate(LABELS)},
}  # fmt: skip
AC_CONFIG: Final[Mapping[str, Any]] = {
    "model_type": "vjepa2_ac",
    "encoder": dict(ENCODER),
    "ac_predictor": {
        "embed_dim": WIDTH, "predictor_embed_dim": PREDICTOR_WIDTH, "depth": 2, "num_heads": 3, "mlp_ratio": 4.0,
        "action_embed_dim": POSE, "use_extrinsics": False, "max_latent_frames": 32,
    },
}  # fmt: skip
LOUD: Final = {"action_encoder": 12.0, "state_encoder": 1.5}
"""Actions and states are small numbers: with these gains they matter to random weights as they do to trained ones."""


def base_files(folder: Path) -> None:
    """Write `vjepa2:tiny`: a classifier in the hub's layout."""
    _write(folder, BASE_CONFIG, hub_names(2, 2, pooler_layers=1), seed=2)


def ac_files(folder: Path) -> None:
    """Write `vjepa2_ac:tiny`, with the official names of encoder and predictor."""
    _write(folder, AC_CONFIG, official_ac_names(2, 2), seed=3)


def _write(folder: Path, config: Mapping[str, Any], names: Iterable[str], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _random(name, generator) for name in names}
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(weights, folder / WHOLE, metadata={"format": "pt"})


def _random(name: str, generator: torch.Generator) -> Tensor:
    """One tensor: norms near 1, biases near 0, matrices that keep the size of what they multiply."""
    shape = _shape(plain(name))
    value = torch.randn(shape, generator=generator)
    stem, _, kind = plain(name).rpartition(".")
    if kind == "bias":
        return 0.1 * value
    if kind in ("mask_tokens", "query_tokens"):
        return value
    if len(shape) == 1:
        return 1 + 0.2 * value
    return value * LOUD.get(stem.rpartition(".")[2], 1.0) / math.sqrt(math.prod(shape[1:]))


def _shape(name: str) -> tuple[int, ...]:
    """The shape behind a plain name."""
    if name.endswith("mask_tokens"):
        return (10, 1, 1, PREDICTOR_WIDTH)
    if name.endswith("query_tokens"):
        return (1, 1, WIDTH)
    stem, _, kind = name.rpartition(".")
    outputs, inputs = _sizes(stem)
    if kind == "bias" or inputs is None:
        return (outputs,)
    return (outputs, *inputs)


def _sizes(stem: str) -> tuple[int, tuple[int, ...] | None]:
    """Outputs of a layer, and the shape of what it reads; None for a norm."""
    is_predictor = stem.startswith("predictor.")
    width = PREDICTOR_WIDTH if is_predictor else WIDTH
    last = stem.rpartition(".")[2]
    match last:
        case _ if "norm" in last:
            return width, None
        case "fc1":
            return 4 * width, (width,)
        case "fc2":
            return width, (4 * width,)
        case "qkv":
            return 3 * width, (width,)
        case "classifier":
            return len(LABELS), (WIDTH,)
        case "predictor_embed" | "predictor_embeddings":
            return width, (WIDTH,)
        case "action_encoder" | "state_encoder":
            return width, (POSE,)
        case "extrinsics_encoder":
            return width, (6,)
        case "predictor_proj":
            return WIDTH, (width,)
        case "proj" if "patch_embed" in stem:
            return WIDTH, (3, 2, PATCH, PATCH)
        case "proj" if stem == "predictor.proj":
            return WIDTH, (width,)
        case _:
            return width, (width,)
