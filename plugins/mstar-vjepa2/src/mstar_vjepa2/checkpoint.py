"""Sizes from a checkpoint folder's config.json, where it has one. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import WeightsError
from mstar_vjepa2.ac_graph import Sizes

CONFIG: Final = "config.json"


def read_ac_sizes(folder: Path) -> Sizes:
    """Sizes of the AC checkpoint in `folder`. The official .pt comes without a config: then the released sizes."""
    path = folder / CONFIG
    if not path.exists():
        return Sizes()
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        encoder, predictor = config["encoder"], config["ac_predictor"]
        heads = int(predictor["num_heads"])
        return Sizes(
            layers=int(predictor["depth"]),
            heads=heads,
            head_dim=int(predictor["predictor_embed_dim"]) // heads,
            patches=(int(encoder["crop_size"]) // int(encoder["patch_size"])) ** 2,
            conditions=3 if predictor.get("use_extrinsics") else 2,
        )
    except KeyError as error:
        raise WeightsError(
            f"{path} lacks {error.args[0]}", hint="write the file as the README says", file=str(path)
        ) from error
    except (OSError, TypeError, ValueError, ZeroDivisionError) as error:
        raise WeightsError(
            f"{path} cannot be read", str(error), "write the file as the README says", file=str(path)
        ) from error
