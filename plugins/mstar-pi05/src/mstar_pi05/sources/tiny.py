"""The generated checkpoint `pi05:tiny`: small, random, in openpi's layout, identical on every machine.

torch and tokenizers are imported only when files are written, because most starts find them on the disk.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.weights.sources import generated_checkpoint
from mstar_pi05.checkpoint.config import CONFIG, read_sizes
from mstar_pi05.robots.statistics import FILE

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Generator, Tensor

VERSION: Final = 1
"""Version of the generated files. A folder of an older version is replaced."""

SEED: Final = 2025
ASSET: Final = "tiny"
STATE, ACTIONS = 8, 8
"""Values of state and actions in the statistics: a robot with one arm and a gripper."""

SPACE: Final = "▁"
SPECIALS: Final = ("<pad>", "<eos>", "<bos>", "<unk>")
BYTES: Final = 256
LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,;:-!?'".replace(" ", SPACE)
MERGES: Final = (
    "▁ t",
    "▁t h",
    "▁th e",
    "T a",
    "s k",
    "Ta sk",
    "S t",
    "a t",
    "St at",
    "Stat e",
    "A c",
    "t i",
    "o n",
    "ti on",
    "Ac tion",
    "▁ State",
    "1 2",
    "2 5",
    "12 8",
    "25 5",
    "▁ 128",
    "▁ 255",
    "e r",
    "i n",
    "r e",
    "re d",
    "▁ red",
    "▁ b",
    "o c",
    "oc k",
    "u p",
    "▁ up",
)
CONFIG_VALUES: Final = {
    "max_token_len": 96,
    "action_dim": 32,
    "action_horizon": 10,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
    "time_min_period": 0.004,
    "time_max_period": 4.0,
    "vision": {"width": 32, "layers": 2, "heads": 2, "mlp": 64, "image_size": 28, "patch_size": 14},
    "language": {"width": 48, "layers": 2, "mlp": 96, "heads": 4, "kv_heads": 1, "head_dim": 16},
    "expert": {"width": 32, "layers": 2, "mlp": 64, "heads": 4, "kv_heads": 1, "head_dim": 16},
}


def write_tiny(folder: Path) -> Path:
    """Write `pi05:tiny` into `folder` and return it. Raises StartError when the folder cannot be written."""
    return generated_checkpoint(folder, "pi05:tiny", VERSION, write_files)


def write_files(folder: Path) -> None:
    """Write config, tokenizer, statistics and weights."""
    import torch
    from safetensors.torch import save_file

    from mstar_pi05.published import names, policy_target, shapes

    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    _write_json(folder / CONFIG, {"vocab_size": vocab, **CONFIG_VALUES})
    asset = folder / "assets" / ASSET
    asset.mkdir(parents=True)
    _write_json(asset / FILE, {"norm_stats": {"state": _spread(STATE, 0.25), "actions": _spread(ACTIONS, -0.125)}})
    sizes = read_sizes(folder)
    shape_of = shapes(sizes)
    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for name in sorted(names(sizes)):
        place = policy_target(name)
        if place is not None:
            weights[name] = _drawn(name, shape_of[place], generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer() -> Tokenizer:
    """Return a BPE tokenizer with byte fallback, `▁` for spaces, and line ends as separate tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    merges = [(left, right) for left, right in (pair.split() for pair in MERGES)]
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(BYTES)), "\n"]
    letters = [letter for letter in dict.fromkeys(LETTERS) if letter not in pieces]
    joined = [left + right for left, right in merges if left + right not in letters]
    vocab = {piece: number for number, piece in enumerate([*pieces, *letters, *dict.fromkeys(joined)])}
    bpe = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in SPECIALS])
    tokenizer.add_tokens([AddedToken("\n", normalized=False, special=False)])
    return tokenizer


def _spread(count: int, middle: float) -> dict[str, list[float]]:
    """Return statistics around `middle` that widen with each value."""
    low = [middle - 1.0 - 0.125 * index for index in range(count)]
    high = [middle + 1.0 + 0.125 * index for index in range(count)]
    means = [middle] * count
    return {"mean": means, "std": [0.5 + 0.0625 * index for index in range(count)], "q01": low, "q99": high}


def _drawn(name: str, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Draw random weights under which every stage has an effect: adaptive norms and gates are not zero."""
    import torch

    drawn: Tensor = torch.randn(shape, generator=generator)
    if name.endswith("dense.bias"):
        drawn = 0.1 * drawn
        drawn[2 * len(drawn) // 3 :] += 0.5  # gates
        return drawn
    if "norm" in name:
        centre = 1.0 if name.endswith("weight") and ("layer_norm" in name or "post_layernorm" in name) else 0.0
        return centre + 0.1 * drawn
    if len(shape) == 1:
        return 0.05 * drawn
    if name.endswith(("position_embedding.weight", "lm_head.weight")):
        return drawn * (0.2 if "position" in name else 1.0 / math.sqrt(shape[1]))
    return drawn / math.sqrt(math.prod(shape[1:]))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
