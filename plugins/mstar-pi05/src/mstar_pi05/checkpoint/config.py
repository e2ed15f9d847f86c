"""Sizes of a Pi0.5 checkpoint, read from its config.json in either published layout. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from mstar_core.errors import did_you_mean
from mstar_core.plugin.json_fields import JsonFields

ACTION_WIDTH: Final = 32
"""Values per action step inside the model, and maximum values of a state."""

CAMERAS: Final = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""Camera names of the model, in the order of the prefix."""


IMAGE: Final = -1
"""Token id in the prefix at the positions of camera vectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """Sizes of one of the two transformers. layers, kv_heads and head_dim are equal, because the expert reads the
    other's cache.
    """

    width: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """Sizes of the image tower (SigLIP). image_size, patch_size: pixels."""

    width: int = 1152
    layers: int = 27
    heads: int = 16
    mlp: int = 4304
    image_size: int = 224
    patch_size: int = 14

    @property
    def tokens(self) -> int:
        """Prefix positions of one camera."""
        return (self.image_size // self.patch_size) ** 2


VARIANTS: Final[Mapping[str, Tower]] = {
    "gemma_2b": Tower(width=2048, layers=18, mlp=16384, heads=8, kv_heads=1, head_dim=256),
    "gemma_300m": Tower(width=1024, layers=18, mlp=4096, heads=8, kv_heads=1, head_dim=256),
}
"""Sizes that released config files refer to by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of one checkpoint with one horizon. Defaults: lerobot/pi05_base.

    prompt_ids: maximum ids of a prompt. horizon: action steps per response. Periods: of the flow time
    embedding.
    """

    vocab: int = 257152
    prompt_ids: int = 200
    horizon: int = 50
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    layer_norm_eps: float = 1e-6
    min_period: float = 4e-3
    max_period: float = 4.0
    vision: Vision = field(default_factory=Vision)
    language: Tower = VARIANTS["gemma_2b"]
    expert: Tower = VARIANTS["gemma_300m"]


def fitted(sizes: Sizes, horizon: int | None) -> Sizes:
    """Return the sizes with the deployment's horizon, if it sets one."""
    return sizes if horizon is None else replace(sizes, horizon=horizon)


CONFIG: Final = "config.json"
SHARED: Final = ("layers", "kv_heads", "head_dim")
"""Sizes that both transformers must share."""


def read_sizes(folder: Path | None) -> Sizes:
    """Return the checkpoint's sizes, or those of the base release without a folder. Raises WeightsError naming file and
    key.
    """
    return Sizes() if folder is None else _Config(folder / CONFIG).sizes()


class _Config:
    """A config.json in lerobot's or openpi's format, or with explicit sizes."""

    def __init__(self, path: Path) -> None:
        self._fields = JsonFields.read(path)

    def sizes(self) -> Sizes:
        self._refuse_others()
        fields, default, language = self._fields, Sizes(), self._tower("language", "paligemma_variant", "gemma_2b")
        sizes = Sizes(
            vocab=fields.number("vocab_size", default.vocab),
            prompt_ids=fields.number("tokenizer_max_length", fields.number("max_token_len", default.prompt_ids)),
            horizon=fields.number("chunk_size", fields.number("action_horizon", default.horizon)),
            rope_base=fields.real("rope_theta", default.rope_base),
            norm_eps=fields.real("rms_norm_eps", default.norm_eps),
            layer_norm_eps=fields.real("layer_norm_eps", default.layer_norm_eps),
            min_period=fields.real("min_period", fields.real("time_min_period", default.min_period)),
            max_period=fields.real("max_period", fields.real("time_max_period", default.max_period)),
            vision=self._vision(),
            language=language,
            expert=self._tower("expert", "action_expert_variant", "gemma_300m", language),
        )
        self._check(sizes)
        return sizes

    def _refuse_others(self) -> None:
        if self._fields.get("type", "pi05") != "pi05":
            raise self._fields.error("type", hint="use a Pi0.5 checkpoint")
        for key in ("max_action_dim", "action_dim"):
            if self._fields.number(key, ACTION_WIDTH) != ACTION_WIDTH:
                raise self._fields.error(key, hint=f"Pi0.5 has {ACTION_WIDTH} values per action")

    def _vision(self) -> Vision:
        fields, default = self._fields.part("vision"), Vision()
        side = self._fields.get("image_resolution")
        size = default.image_size if side is None else side[0] if isinstance(side, list) and side else None
        if size is None or (isinstance(side, list) and set(side) != {size}):
            raise self._fields.error("image_resolution", hint="write two equal numbers of pixels")
        names = ("width", "layers", "heads", "mlp", "patch_size")
        sizes = {name: fields.number(name, getattr(default, name)) for name in names}
        return Vision(**sizes, image_size=fields.number("image_size", size))

    def _tower(self, part: str, variant_key: str, default: str, shares: Tower | None = None) -> Tower:
        """Return a transformer's sizes. shares: the transformer whose cache it reads, and whose shared sizes it has."""
        name = self._fields.get(variant_key, default)
        if name not in VARIANTS:
            raise self._fields.error(variant_key, hint=did_you_mean(str(name), VARIANTS))
        fields, known = self._fields.part(part), VARIANTS[name]
        if shares is not None:
            known = replace(known, **{key: getattr(shares, key) for key in SHARED})
        names = ("width", "layers", "mlp", "heads", "kv_heads", "head_dim")
        return Tower(**{key: fields.number(key, getattr(known, key)) for key in names})

    def _check(self, sizes: Sizes) -> None:
        vision = sizes.vision
        for name in SHARED:
            values = getattr(sizes.language, name), getattr(sizes.expert, name)
            if values[0] != values[1]:
                hint = f"the language model has {values[0]}, and the expert reads its cache"
                raise self._fields.part("expert").error(name, hint=hint)
        if vision.image_size % vision.patch_size:
            hint = f"a multiple of {vision.patch_size} is required"
            raise self._fields.part("vision").error("image_size", hint=hint)
