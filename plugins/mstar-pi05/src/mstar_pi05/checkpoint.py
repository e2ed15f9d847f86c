"""Sizes from a checkpoint folder's config.json, and the deployment's options. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import ConfigError, WeightsError
from mstar_pi05.graph import Sizes

CONFIG: Final = "config.json"
LONGEST_HORIZON: Final = 1000

MODEL_KWARGS: Final[Mapping[str, Any]] = {
    "action_horizon": None,
    "action_dim": None,
    "state_in_prompt": True,
    "norm_stats": None,
    "robot": None,
    "default_prompt": None,
}
"""Options of a deployment; the plugin's README says what each does. None: the checkpoint's own value, or none."""


def read_sizes(folder: Path | None, model_kwargs: Mapping[str, Any]) -> Sizes:
    """Sizes of the checkpoint with the deployment's horizon. Raises WeightsError or ConfigError naming the key."""
    sizes = Sizes() if folder is None else _from_config(folder / CONFIG)
    horizon = model_kwargs.get("action_horizon")
    if horizon is None:
        return sizes
    if isinstance(horizon, bool) or not isinstance(horizon, int) or not 1 <= horizon <= LONGEST_HORIZON:
        raise ConfigError(
            f"model_kwargs.action_horizon is {horizon!r}",
            hint=f"a whole number from 1 to {LONGEST_HORIZON}",
            key="model_kwargs.action_horizon",
        )
    return replace(sizes, horizon=horizon)


def _from_config(path: Path) -> Sizes:
    try:
        return _sizes_in(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise WeightsError(f"{path} cannot be read", str(error), "fetch this file again", file=str(path)) from error


def _sizes_in(config: dict[str, Any]) -> Sizes:
    default = Sizes()
    # Released files name a variant (gemma_2b) and no sizes; converted ones may give the sizes themselves.
    language, vision = config.get("language") or {}, config.get("vision") or {}
    return Sizes(
        layers=int(language.get("layers", default.layers)),
        kv_heads=int(language.get("kv_heads", default.kv_heads)),
        head_dim=int(language.get("head_dim", default.head_dim)),
        image_side=int(vision.get("image_size", default.image_side)),
        horizon=int(config.get("chunk_size") or config.get("action_horizon") or default.horizon),
    )
