"""Sizes and ids from the JSON files of a checkpoint folder. Used by every process; standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from mstar_bagel.graph import Sizes
from mstar_core.errors import WeightsError

LLM_CONFIG: Final = "llm_config.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
STOP: Final = "<|im_end|>"


def read_sizes(folder: Path) -> Sizes:
    """Read the sizes of the checkpoint in `folder`. Raises WeightsError with file and key."""
    path = folder / LLM_CONFIG
    config = _read(path)
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return Sizes(
            layers=int(config["num_hidden_layers"]),
            kv_heads=int(config["num_key_value_heads"]),
            head_dim=hidden // heads,
            stop_id=_stop_id(folder),
        )
    except KeyError as error:
        raise WeightsError(f"{path} lacks {error.args[0]}", hint="download this file again", file=str(path)) from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise WeightsError(
            f"{path} contains an invalid size", str(error), "download this file again", file=str(path)
        ) from error


def _stop_id(folder: Path) -> int:
    added = _read(folder / TOKENIZER_CONFIG).get("added_tokens_decoder", {})
    for number, token in added.items():
        if token.get("content") == STOP:
            return int(number)
    return Sizes().stop_id


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read", str(error), "download this file again", file=str(path)) from error
    if not isinstance(found, dict):
        raise WeightsError(f"{path} does not contain a JSON object", hint="download this file again", file=str(path))
    return found
