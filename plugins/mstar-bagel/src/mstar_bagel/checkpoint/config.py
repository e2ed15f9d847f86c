"""Sizes and ids of a checkpoint folder, from its JSON files and the headers of its weights. Standard library only.

Used by every process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import WeightsError

LLM_CONFIG: Final = "llm_config.json"
VIT_CONFIG: Final = "vit_config.json"
CONFIG: Final = "config.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
MODEL_FILE: Final = "ema.safetensors"
VAE_FILE: Final = "ae.safetensors"
LATENT_TABLE: Final = "latent_pos_embed.pos_embed"
VIT_TABLE: Final = "vit_pos_embed.pos_embed"
_HEADER_LIMIT: Final = 100_000_000
_HINT: Final = "download this file again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """Sizes of the language model. Defaults: Qwen2.5-7B."""

    width: int = 3584
    layers: int = 28
    heads: int = 28
    kv_heads: int = 4
    head_dim: int = 128
    mlp: int = 18944
    vocab: int = 152064
    rope_theta: float = 1e6
    eps: float = 1e-6
    max_positions: int = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """Sizes of the image encoder. layers: those that run, one fewer than vit_config.json names. grid: table side."""

    width: int = 1152
    layers: int = 26
    heads: int = 16
    mlp: int = 4304
    patch: int = 14
    channels: int = 3
    grid: int = 70
    eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoencoder:
    """Sizes of the FLUX.1 autoencoder. blocks: residual blocks of an encoder level; a decoder level has one more."""

    width: int = 128
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    blocks: int = 2
    channels: int = 16
    scale: float = 0.3611
    shift: float = 0.1159

    @property
    def downsample(self) -> int:
        """Pixels per latent value and axis."""
        return 1 << (len(self.multipliers) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlIds:
    """Ids of the control tokens."""

    start: int = 151644
    end: int = 151645
    image_start: int = 151652
    image_end: int = 151653


CONTROL: Final[Mapping[str, str]] = {
    "start": "<|im_start|>",
    "end": "<|im_end|>",
    "image_start": "<|vision_start|>",
    "image_end": "<|vision_end|>",
}
"""Control tokens by their field of ControlIds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRule:
    """Bounds of an image's sides in pixels. See `request.images.resized_size`."""

    longest: int
    shortest: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a checkpoint. Defaults: ByteDance-Seed/BAGEL-7B-MoT."""

    language: Language = field(default_factory=Language)
    vision: Vision = field(default_factory=Vision)
    vae: Autoencoder = field(default_factory=Autoencoder)
    ids: ControlIds = field(default_factory=ControlIds)
    latent_patch: int = 2
    latent_grid: int = 64
    vae_rule: ResizeRule = ResizeRule(longest=1024, shortest=512, stride=16)
    vit_rule: ResizeRule = ResizeRule(longest=980, shortest=224, stride=14)

    @property
    def latent_width(self) -> int:
        """Values of a latent token: a patch of the autoencoder's channels."""
        return self.latent_patch**2 * self.vae.channels

    @property
    def token_pixels(self) -> int:
        """Pixels per latent token and axis."""
        return self.latent_patch * self.vae.downsample

    @property
    def longest_side(self) -> int:
        """Longest side of a new image in pixels."""
        return self.latent_grid * self.token_pixels


def read_sizes(folder: Path) -> Sizes:
    """Read the sizes of the checkpoint in `folder`. Raises WeightsError with file and key."""
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    shapes = header_shapes(folder / MODEL_FILE) if (folder / MODEL_FILE).is_file() else {}
    rules = config.get("preprocess", {})
    base = Sizes()
    patch = int(config.get("latent_patch_size", base.latent_patch))
    return Sizes(
        language=_language(folder / LLM_CONFIG),
        vision=_vision(folder / VIT_CONFIG, config, shapes),
        vae=_autoencoder(config.get("vae_config") or {}),
        ids=_control_ids(folder),
        latent_patch=patch,
        latent_grid=_side(shapes, LATENT_TABLE, base.latent_grid),
        vae_rule=_rule(rules.get("vae"), base.vae_rule),
        vit_rule=_rule(rules.get("vit"), base.vit_rule),
    )


def header_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a safetensors file by name. Raises WeightsError if its header is damaged."""
    try:
        _, entries = _header(path)
        return {name: tuple(map(int, entry["shape"])) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} has no readable header", str(error), _HINT, file=str(path)) from error


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data begins, and the entries of the tensors."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _HEADER_LIMIT:
            raise ValueError(f"a header of {size} bytes")
        entries = json.loads(file.read(size))
    entries.pop("__metadata__", None)
    return 8 + size, entries


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises WeightsError with the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read", str(error), _HINT, file=str(path)) from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} does not contain a JSON object", hint=_HINT, file=str(path))
    return content


def _language(path: Path) -> Language:
    config, base = read_json(path), Language()
    width, heads = _number(config, "hidden_size", path), _number(config, "num_attention_heads", path)
    return Language(
        width=width,
        heads=heads,
        head_dim=width // heads,
        layers=_number(config, "num_hidden_layers", path),
        kv_heads=_number(config, "num_key_value_heads", path),
        mlp=_number(config, "intermediate_size", path, base.mlp),
        vocab=_number(config, "vocab_size", path, base.vocab),
        max_positions=_number(config, "max_position_embeddings", path, base.max_positions),
        rope_theta=_real(config, "rope_theta", path, base.rope_theta),
        eps=_real(config, "rms_norm_eps", path, base.eps),
    )


def _vision(path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Vision:
    base = Vision()
    fields = read_json(path) if path.is_file() else {}
    return Vision(
        width=_number(fields, "hidden_size", path, base.width),
        # The reference removes the last layer, and the weights do not contain it.
        layers=_number(fields, "num_hidden_layers", path, base.layers + 1) - 1,
        heads=_number(fields, "num_attention_heads", path, base.heads),
        mlp=_number(fields, "intermediate_size", path, base.mlp),
        patch=_number(fields, "patch_size", path, base.patch),
        channels=_number(fields, "num_channels", path, base.channels),
        grid=_side(shapes, VIT_TABLE, int(config.get("vit_max_num_patch_per_side", base.grid))),
        eps=_real(fields, "layer_norm_eps", path, base.eps),
    )


def _autoencoder(config: Mapping[str, Any]) -> Autoencoder:
    base = Autoencoder()
    return Autoencoder(
        width=int(config.get("ch", base.width)),
        multipliers=tuple(map(int, config.get("ch_mult", base.multipliers))),
        blocks=int(config.get("num_res_blocks", base.blocks)),
        channels=int(config.get("z_channels", base.channels)),
        scale=float(config.get("scale_factor", base.scale)),
        shift=float(config.get("shift_factor", base.shift)),
    )


def _control_ids(folder: Path) -> ControlIds:
    path, base = folder / TOKENIZER_CONFIG, ControlIds()
    added = read_json(path).get("added_tokens_decoder", {}) if path.is_file() else {}
    ids = {token.get("content"): int(number) for number, token in added.items()}
    return ControlIds(**{name: ids.get(text, getattr(base, name)) for name, text in CONTROL.items()})


def _side(shapes: Mapping[str, tuple[int, ...]], name: str, default: int) -> int:
    """Return the side of a square table. The JSON files may contain an older side than the weights."""
    return math.isqrt(shapes[name][0]) if name in shapes else default


def _rule(sizes: Mapping[str, Any] | None, default: ResizeRule) -> ResizeRule:
    if not sizes:
        return default
    return ResizeRule(longest=int(sizes["max_size"]), shortest=int(sizes["min_size"]), stride=int(sizes["stride"]))


def _number(config: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = config.get(key, default)
    if value is None:
        raise WeightsError(f"{path} lacks {key}", hint=_HINT, file=str(path), key=key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WeightsError(
            f"{path} contains an invalid size",
            f"{key} is {value!r}, not a positive integer",
            _HINT,
            file=str(path),
            key=key,
        )
    return value


def _real(config: Mapping[str, Any], key: str, path: Path, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise WeightsError(
            f"{path} contains an invalid value",
            f"{key} is {value!r}, not a positive number",
            _HINT,
            file=str(path),
            key=key,
        )
    return float(value)
