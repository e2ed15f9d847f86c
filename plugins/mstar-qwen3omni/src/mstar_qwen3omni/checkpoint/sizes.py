"""Sizes and ids from the config.json of a checkpoint folder. Used by every process; standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import WeightsError
from mstar_qwen3omni.graph import Sizes

CONFIG: Final = "config.json"


def read_sizes(folder: Path) -> Sizes:
    """Read the sizes of the checkpoint in `folder`. Raises WeightsError with file and key."""
    path = folder / CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        thinker, talker = config["thinker_config"]["text_config"], config["talker_config"]
        speech = talker["text_config"]
        return Sizes(
            thinker_layers=int(thinker["num_hidden_layers"]),
            thinker_kv_heads=int(thinker["num_key_value_heads"]),
            thinker_head_dim=int(thinker["head_dim"]),
            talker_layers=int(speech["num_hidden_layers"]),
            talker_kv_heads=int(speech["num_key_value_heads"]),
            talker_head_dim=int(speech["head_dim"]),
            talker_vocab=int(speech["vocab_size"]),
            code_groups=int(talker["num_code_groups"]),
            stop_id=int(config["im_end_token_id"]),
            codec_stop_id=int(talker["codec_eos_token_id"]),
        )
    except KeyError as error:
        raise WeightsError(f"{path} lacks {error.args[0]}", hint="download this file again", file=str(path)) from error
    except (OSError, TypeError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read", str(error), "download this file again", file=str(path)) from error
