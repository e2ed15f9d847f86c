"""LoRA adapters in PEFT's layout: `adapter_config.json` beside `adapter_model.safetensors`. Read by workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mstar_core.errors import WeightsError, did_you_mean
from mstar_core.weights.checkpoint import open_tensors, tensor_names

if TYPE_CHECKING:
    from torch import Tensor

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections that an adapter may change."""

PREFIX: Final = "base_model.model."
"""PEFT's prefix of the base model's own names."""

PARTS: Final = {".lora_A.weight": "a", ".lora_B.weight": "b"}

REFUSED: Final = {
    "use_dora": "DoRA",
    "lora_bias": "biases of its own",
    "fan_in_fan_out": "transposed weights",
    "modules_to_save": "whole modules besides LoRA",
    "alpha_pattern": "an alpha of its own for some modules",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "parameters outside linear layers",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA",
}
"""Settings that change more than LoRA's products, in words. They are refused unless they are off."""

CHANGES_BASE: Final = ("pissa", "olora", "loftq", "corda")
"""Initializations that changed the base model's weights in training, so that the adapter needs those."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Settings of `adapter_config.json`. is_stabilized: the scale is alpha / sqrt(rank), as rsLoRA has it."""

    alpha: float
    base: str = ""
    is_stabilized: bool = False

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Read the configuration of an adapter's folder. Raises WeightsError for what is not supported, by name."""
        path = folder / CONFIG
        values = _json(path)
        kind = values.get("peft_type", "LORA")
        if kind != "LORA":
            raise _unsupported(path, f"peft_type {kind}", "only LORA is supported")
        for key, meaning in REFUSED.items():
            if values.get(key):
                raise _unsupported(path, f"{key}: {meaning}", f"it has {key}: {json.dumps(values[key])}")
        if values.get("bias", "none") != "none":
            raise _unsupported(path, "trained biases", f"it has bias: {values['bias']!r}")
        start = str(values.get("init_lora_weights", True)).lower()
        if start.startswith(CHANGES_BASE):
            raise _unsupported(path, f"init_lora_weights {start}", "it needs base weights that its training changed")
        _check_targets(path, values.get("target_modules"))
        alpha = values.get("lora_alpha")
        if not isinstance(alpha, int | float) or isinstance(alpha, bool):
            raise WeightsError(f"{path} has no alpha", f"lora_alpha is {alpha!r}", file=str(path))
        base = str(values.get("base_model_name_or_path") or "")
        return cls(alpha=float(alpha), base=base, is_stabilized=bool(values.get("use_rslora")))

    def scale(self, rank: int) -> float:
        """Return the factor of B @ A for a projection of this rank."""
        return self.alpha / (rank**0.5 if self.is_stabilized else rank)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        hint = f"give the folder that holds {CONFIG} and {WEIGHTS}"
        raise WeightsError(f"{path.parent} is no LoRA adapter", f"it has no {CONFIG}", hint, file=str(path))
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise WeightsError(f"{path} cannot be read", str(error), file=str(path)) from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path} must contain a mapping", file=str(path))
    return values


def _check_targets(path: Path, targets: object) -> None:
    """Refuse a list of target modules with names that cannot be adapted. A pattern is checked by the tensors alone."""
    for target in targets if isinstance(targets, list) else ():
        name = str(target).rpartition(".")[2]
        if name not in TARGETS:
            raise _unsupported(path, f"target module {target!r}", f"adapters may change {', '.join(TARGETS)}")


def _split(path: Path, stored: str) -> tuple[str, str, str]:
    """Return a stored name, the base model's name of its projection, and `a` or `b`."""
    suffix = next((suffix for suffix in PARTS if stored.endswith(suffix)), None)
    if suffix is None:
        raise _unsupported(path, f"tensor {stored}", "only lora_A and lora_B of linear layers are supported")
    module = stored.removesuffix(suffix).removeprefix(PREFIX)
    name = module.rpartition(".")[2]
    if name not in TARGETS:
        raise _unsupported(
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


def _unsupported(path: Path, what: str, detail: str, hint: str = "") -> WeightsError:
    return WeightsError(
        f"an adapter with {what} is not supported", detail, hint or "merge it into its base model", file=str(path)
    )
