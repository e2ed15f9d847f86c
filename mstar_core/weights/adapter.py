"""LoRA adapters in PEFT's layout: `adapter_config.json` beside `adapter_model.safetensors`. Read by workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.errors import WeightsError, did_you_mean
from mstar_core.weights.adapter_config import TARGETS, WEIGHTS, AdapterConfig, unsupported
from mstar_core.weights.checkpoint import open_tensors, tensor_names

if TYPE_CHECKING:
    from torch import Tensor

PREFIX: Final = "base_model.model."
"""PEFT's prefix of the base model's own names."""

PARTS: Final = {".lora_A.weight": "a", ".lora_B.weight": "b"}


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapted projection: W + scale * B @ A. a: [rank, inputs]. b: [outputs, rank]."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Its rank."""
        return int(self.a.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter on the host. weights: by the base model's name of the projection. base: the base model's name."""

    folder: Path
    base: str
    weights: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """Its largest rank."""
        return max((each.rank for each in self.weights.values()), default=0)

    @classmethod
    def read(cls, folder: Path) -> Adapter:
        """Read an adapter. Raises WeightsError with the cause for one that is damaged or needs more than LoRA."""
        config = AdapterConfig.read(folder)
        path = folder / WEIGHTS
        if not path.is_file():
            raise WeightsError(f"{folder} contains no adapter", f"looked for {WEIGHTS}", file=str(path))
        names = [_split(path, name) for name in tensor_names(path)]
        parts: dict[str, dict[str, Tensor]] = {}
        with open_tensors(path) as reader:
            for stored, module, part in names:
                parts.setdefault(module, {})[part] = reader.get_tensor(stored)
        if not parts:
            raise WeightsError(f"{path} contains no LoRA tensors", file=str(path))
        weights = {module: _low_rank(path, module, pair, config) for module, pair in parts.items()}
        return cls(folder=folder, base=config.base, weights=weights)


def _split(path: Path, stored: str) -> tuple[str, str, str]:
    """Return a stored name, the base model's name of its projection, and `a` or `b`."""
    suffix = next((suffix for suffix in PARTS if stored.endswith(suffix)), None)
    if suffix is None:
        raise unsupported(path, f"tensor {stored}", "only lora_A and lora_B of linear layers are supported")
    module = stored.removesuffix(suffix).removeprefix(PREFIX)
    name = module.rpartition(".")[2]
    if name not in TARGETS:
        raise unsupported(
            path, f"target module {module!r}", f"adapters may change {', '.join(TARGETS)}", did_you_mean(name, TARGETS)
        )
    return stored, module, PARTS[suffix]


def _low_rank(path: Path, module: str, pair: Mapping[str, Tensor], config: AdapterConfig) -> LowRank:
    if len(pair) < len(PARTS):
        raise WeightsError(f"{path} has only one of lora_A and lora_B of {module}", file=str(path))
    a, b = pair["a"], pair["b"]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not a.is_floating_point():
        shapes = f"lora_A is {list(a.shape)}, lora_B is {list(b.shape)}"
        raise WeightsError(f"{path} does not fit together at {module}", shapes, file=str(path))
    return LowRank(a, b, config.scale(int(a.shape[0])))
