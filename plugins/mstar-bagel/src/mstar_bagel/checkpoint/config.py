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
from mstar_core.plugin.json_fields import DAMAGED, JsonFields

LLM_CONFIG: Final = "llm_config.json"
VIT_CONFIG: Final = "vit_config.json"
CONFIG: Final = "config.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
MODEL_FILE: Final = "ema.safetensors"
VAE_FILE: Final = "ae.safetensors"
LATENT_TABLE: Final = "latent_pos_embed.pos_embed"
VIT_TABLE: Final = "vit_pos_embed.pos_embed"
_HEADER_LIMIT: Final = 100_000_000


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
    config = JsonFields.read_if_any(folder / CONFIG)
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
        raise WeightsError(f"{path} has no readable header", str(error), DAMAGED, file=str(path)) from error


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data begins, and the entries of the tensors."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _HEADER_LIMIT:
            raise ValueError(f"a header of {size} bytes")
        entries = json.loads(file.read(size))
    entries.pop("__metadata__", None)
    return 8 + size, entries


def _language(path: Path) -> Language:
    config, base = JsonFields.read(path), Language()
    width, heads = config.number("hidden_size"), config.number("num_attention_heads")
    return Language(
        width=width,
        heads=heads,
        head_dim=width // heads,
        layers=config.number("num_hidden_layers"),
        kv_heads=config.number("num_key_value_heads"),
        mlp=config.number("intermediate_size", base.mlp),
        vocab=config.number("vocab_size", base.vocab),
        max_positions=config.number("max_position_embeddings", base.max_positions),
        rope_theta=config.real("rope_theta", base.rope_theta),
        eps=config.real("rms_norm_eps", base.eps),
    )


def _vision(path: Path, config: JsonFields, shapes: Mapping[str, tuple[int, ...]]) -> Vision:
    base = Vision()
    fields = JsonFields.read_if_any(path)
    return Vision(
        width=fields.number("hidden_size", base.width),
        # The reference removes the last layer, and the weights do not contain it.
        layers=fields.number("num_hidden_layers", base.layers + 1) - 1,
        heads=fields.number("num_attention_heads", base.heads),
        mlp=fields.number("intermediate_size", base.mlp),
        patch=fields.number("patch_size", base.patch),
        channels=fields.number("num_channels", base.channels),
        grid=_side(shapes, VIT_TABLE, int(config.get("vit_max_num_patch_per_side", base.grid))),
        eps=fields.real("layer_norm_eps", base.eps),
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
    added = JsonFields.read_if_any(path).get("added_tokens_decoder", {})
    ids = {token.get("content"): int(number) for number, token in added.items()}
    return ControlIds(**{name: ids.get(text, getattr(base, name)) for name, text in CONTROL.items()})


def _side(shapes: Mapping[str, tuple[int, ...]], name: str, default: int) -> int:
    """Return the side of a square table. The JSON files may contain an older side than the weights."""
    return math.isqrt(shapes[name][0]) if name in shapes else default


def _rule(sizes: Mapping[str, Any] | None, default: ResizeRule) -> ResizeRule:
    if not sizes:
        return default
    return ResizeRule(longest=int(sizes["max_size"]), shortest=int(sizes["min_size"]), stride=int(sizes["stride"]))
