"""Random LoRA adapters in PEFT's layout, and the merge of one into the weights of its base."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    module: nn.Module,
    seed: int,
    *,
    rank: int = 4,
    alpha: float = 16.0,
    targets: Iterable[str] = TARGETS,
    config: dict[str, Any] | None = None,
    size: float = 1.0,
) -> Path:
    """Write a random adapter of all linear layers of a module that `targets` name. size: of its products."""
    generator, chosen = torch.Generator().manual_seed(seed), set(targets)
    tensors: dict[str, Tensor] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in chosen:
            a = torch.randn(rank, layer.in_features, generator=generator) / layer.in_features**0.5
            b = size * torch.randn(layer.out_features, rank, generator=generator) / rank**0.5
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
    return write_folder(folder, tensors, {"r": rank, "lora_alpha": alpha, "target_modules": sorted(chosen)}, config)


def write_folder(
    folder: Path, tensors: dict[str, Tensor], values: dict[str, Any], changes: dict[str, Any] | None = None
) -> Path:
    """Write an adapter's two files."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "bias": "none", "base_model_name_or_path": "base", **values, **(changes or {})}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(module: nn.Module, folder: Path, scale: float) -> None:
    """Add scale * B @ A to the weights of a module, in float32."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    for name, layer in module.named_modules():
        stem = f"base_model.model.{name}"
        if f"{stem}.lora_A.weight" in tensors and isinstance(layer, nn.Linear):
            product = tensors[f"{stem}.lora_B.weight"].double() @ tensors[f"{stem}.lora_A.weight"].double()
            layer.weight.data = (layer.weight.double() + scale * product).to(layer.weight.dtype)
