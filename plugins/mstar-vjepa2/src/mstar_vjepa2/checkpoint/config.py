"""Checkpoint sizes, read from config.json or, for official files without one, known by file name.

Standard library only: read by every process that binds the spec, by the processors and by the models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import WeightsError

MEAN: Final = (0.485, 0.456, 0.406)
STD: Final = (0.229, 0.224, 0.225)
"""Mean and standard deviation of the training pixels, red, green, blue, on a scale of 0 to 1."""


CONFIG: Final = "config.json"
MOST_LATENT_FRAMES: Final = 32
"""Latent frames of one rollout of the released AC model, context included."""

EPS: Final = 1e-6
"""Epsilon of the affine layer norms of encoder, predictors and pooler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VitConfig:
    """One stack of transformer blocks. inner: hidden width of the MLPs."""

    width: int
    layers: int
    heads: int
    inner: int
    eps: float = EPS


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The video encoder. crop, patch: pixels; tubelet, clip_frames: frames."""

    vit: VitConfig
    crop: int
    patch: int
    tubelet: int
    clip_frames: int
    channels: int = 3

    @property
    def grid(self) -> int:
        """Patches along one side of a frame."""
        return self.crop // self.patch

    @property
    def frame_tokens(self) -> int:
        """Patches of one latent frame."""
        return self.grid**2

    def tokens(self, frames: int) -> int:
        """Return the patches of a clip. A clip shorter than a tubelet is repeated to fill one."""
        return max(1, frames // self.tubelet) * self.frame_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseConfig:
    """A V-JEPA 2 checkpoint. mask_tokens: mask vectors of the predictor. labels: classes of the head."""

    encoder: EncoderConfig
    predictor: VitConfig
    mask_tokens: int
    pooler_layers: int
    labels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionConfig:
    """A V-JEPA 2-AC checkpoint. most_frames: latent frames of one rollout, context included."""

    encoder: EncoderConfig
    predictor: VitConfig
    uses_extrinsics: bool
    most_frames: int

    @property
    def conditions(self) -> int:
        """Tokens of a frame in addition to its patches: action, state, and the camera if it is used."""
        return 3 if self.uses_extrinsics else 2


def encoder_of(
    width: int, layers: int, heads: int, inner: int, crop: int = 256, clip_frames: int = 64
) -> EncoderConfig:
    """Return the config of a published encoder: patches of 16 pixels, tubelets of 2 frames."""
    vit = VitConfig(width=width, layers=layers, heads=heads, inner=inner)
    return EncoderConfig(vit=vit, crop=crop, patch=16, tubelet=2, clip_frames=clip_frames)


PREDICTOR: Final = VitConfig(width=384, layers=12, heads=12, inner=1536)
ENCODERS: Final[Mapping[str, EncoderConfig]] = {
    "vitl": encoder_of(1024, 24, 16, 4096),
    "vith": encoder_of(1280, 32, 16, 5120),
    "vitg": encoder_of(1408, 40, 22, 6144),
    "vitg-384": encoder_of(1408, 40, 22, 6144, crop=384),
}
"""Configs of the official files NAME.pt. Source: the table of the released models."""

RELEASED_AC: Final = ActionConfig(
    encoder=ENCODERS["vitg"],
    predictor=VitConfig(width=1024, layers=24, heads=16, inner=4096),
    uses_extrinsics=False,
    most_frames=MOST_LATENT_FRAMES,
)
"""Config of `vjepa2-ac-vitg.pt`, which is published without one."""


def released(name: str) -> BaseConfig:
    """Return the config of the official file NAME.pt."""
    return BaseConfig(encoder=ENCODERS[name], predictor=PREDICTOR, mask_tokens=10, pooler_layers=3, labels=0)


def read_base(folder: Path) -> BaseConfig:
    """Read the config of the V-JEPA 2 checkpoint in `folder`. Raises WeightsError naming file and key."""
    path = folder / CONFIG
    if not path.exists():
        names = [name for name in ENCODERS if (folder / f"{name}.pt").is_file()]
        if len(names) == 1:
            return released(names[0])
        detail = "only these files are known without one: " + ", ".join(f"{name}.pt" for name in ENCODERS)
        raise WeightsError(f"{path} is missing", detail, "fetch it from the model's repository", file=str(path))
    config = _JsonObject(path, _read(path))
    _refuse_variants(config)
    encoder = _encoder(config)
    return BaseConfig(
        encoder=encoder,
        predictor=_vit(
            config,
            "pred_hidden_size",
            "pred_num_hidden_layers",
            "pred_num_attention_heads",
            "pred_mlp_ratio",
            defaults=(384, 12, 12),
        ),
        mask_tokens=config.count("pred_num_mask_tokens", 10),
        pooler_layers=config.count("num_pooler_layers", 3),
        labels=_labels(config),
    )


def read_action(folder: Path) -> ActionConfig:
    """Read the config of the V-JEPA 2-AC checkpoint in `folder`, or return that of the release if it has no
    config.json.

    Raises WeightsError naming file and key.
    """
    path = folder / CONFIG
    if not path.exists():
        return RELEASED_AC
    whole = _read(path)
    config, encoder = _part(whole, "ac_predictor", path), _part(whole, "encoder", path)
    predictor = _vit(config, "predictor_embed_dim", "depth", "num_heads", "mlp_ratio")
    return ActionConfig(
        encoder=_encoder(encoder),
        predictor=predictor,
        uses_extrinsics=bool(config.values.get("use_extrinsics", False)),
        most_frames=config.count("max_latent_frames", MOST_LATENT_FRAMES),
    )


@dataclass(frozen=True, slots=True)
class _JsonObject:
    """A JSON object whose errors name the file and the key."""

    path: Path
    values: Mapping[str, Any]

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        value = self.values.get(key, default)
        if value is None:
            raise self.error(f"lacks {key}", key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key} is {value!r}, it must be a positive whole number", key)
        return value

    def number(self, key: str, default: float) -> float:
        """Return a number above 0."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.error(f"{key} is {value!r}, it must be a positive number", key)
        return float(value)

    def error(self, what: str, key: str) -> WeightsError:
        """Return the error about a key."""
        return WeightsError(
            f"{self.path} {what}" if what.startswith("lacks") else f"{self.path}: {what}",
            hint="write the file as the README says, or fetch it again",
            file=str(self.path),
            key=key,
        )


def _encoder(config: _JsonObject) -> EncoderConfig:
    crop, patch = config.count("crop_size", 256), config.count("patch_size", 16)
    if crop % patch:
        raise config.error(f"crop_size {crop} must be a multiple of patch_size {patch}", "crop_size")
    return EncoderConfig(
        vit=_vit(
            config,
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "mlp_ratio",
            defaults=(1408, 40, 22),
            ratio=48 / 11 if "hidden_size" not in config.values else 4.0,
        ),
        crop=crop,
        patch=patch,
        tubelet=config.count("tubelet_size", 2),
        clip_frames=config.count("frames_per_clip", 64),
        channels=config.count("in_chans", 3),
    )


def _vit(
    config: _JsonObject,
    width: str,
    layers: str,
    heads: str,
    ratio_key: str,
    defaults: tuple[int | None, int | None, int | None] = (None, None, None),
    ratio: float = 4.0,
) -> VitConfig:
    wide = config.count(width, defaults[0])
    count = config.count(heads, defaults[2])
    if wide % count:
        raise config.error(f"{width} {wide} must be a multiple of {heads} {count}", heads)
    return VitConfig(
        width=wide,
        layers=config.count(layers, defaults[1]),
        heads=count,
        # Rounded, because some files give the ratio 48/11 with few digits: 1408 x 48/11 is 6144.
        inner=round(wide * config.number(ratio_key, ratio)),
        eps=config.number("layer_norm_eps", EPS),
    )


def _labels(config: _JsonObject) -> int:
    named = config.values.get("id2label")
    if isinstance(named, Mapping) and named:
        return len(named)
    return config.count("num_labels", 2) if "num_labels" in config.values else 0


def _refuse_variants(config: _JsonObject) -> None:
    required: dict[str, Any] = {"model_type": "vjepa2", "hidden_act": "gelu", "qkv_bias": True}
    for key, value in required.items():
        if config.values.get(key, value) != value:
            raise config.error(f"{key} is {config.values[key]!r}; this model supports {value!r}", key)


def _part(whole: Mapping[str, Any], key: str, path: Path) -> _JsonObject:
    part = whole.get(key)
    if part is None:
        raise WeightsError(f"{path} lacks {key}", hint="write the file as the README says", file=str(path))
    if not isinstance(part, Mapping):
        raise WeightsError(f"{path}: {key} must be an object", hint="write the file as the README says", file=str(path))
    return _JsonObject(path, part)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read", str(error), "fetch it again", file=str(path)) from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} must contain a JSON object", hint="fetch it again", file=str(path))
    return value
