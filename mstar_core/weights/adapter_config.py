"""Configuration of a LoRA adapter in PEFT's layout: what is supported. Read by `up` and by workers; no tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import WeightsError

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections that an adapter may change."""

MOST_RANK: Final = 512

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Settings of `adapter_config.json`. rank: the largest.

    is_stabilized: the scale is alpha / sqrt(rank), as rsLoRA has it.
    """

    rank: int
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
            raise unsupported(path, f"peft_type {kind}", "only LORA is supported")
        for key, meaning in REFUSED.items():
            if values.get(key):
                raise unsupported(path, f"{key}: {meaning}", f"it has {key}: {json.dumps(values[key])}")
        if values.get("bias", "none") != "none":
            raise unsupported(path, "trained biases", f"it has bias: {values['bias']!r}")
        start = str(values.get("init_lora_weights", True)).lower()
        if start.startswith(CHANGES_BASE):
            raise unsupported(path, f"init_lora_weights {start}", "it needs base weights that its training changed")
        _check_targets(path, values.get("target_modules"))
        rank, alpha = values.get("r"), values.get("lora_alpha")
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MOST_RANK:
            raise WeightsError(f"{path} has no rank from 1 to {MOST_RANK}", f"r is {rank!r}", file=str(path))
        if not isinstance(alpha, int | float) or isinstance(alpha, bool):
            raise WeightsError(f"{path} has no alpha", f"lora_alpha is {alpha!r}", file=str(path))
        base = str(values.get("base_model_name_or_path") or "")
        ranks = values.get("rank_pattern")
        others = [each for each in ranks.values() if isinstance(each, int)] if isinstance(ranks, dict) else []
        most = max([rank, *others])
        return cls(rank=most, alpha=float(alpha), base=base, is_stabilized=bool(values.get("use_rslora")))

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
            raise unsupported(path, f"target module {target!r}", f"adapters may change {', '.join(TARGETS)}")


def unsupported(path: Path, what: str, detail: str, hint: str = "") -> WeightsError:
    """Return the error of an adapter that asks for more than LoRA of the known projections."""
    return WeightsError(
        f"an adapter with {what} is not supported", detail, hint or "merge it into its base model", file=str(path)
    )
