"""Sizes of a checkpoint folder in the diffusers layout, from its JSON files. Standard library only.

Used by every process. Behaviour follows `model_index.json`, never the name of the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import WeightsError

INDEX: Final = "model_index.json"
TEXT: Final = "text_encoder"
TOKENIZER: Final = "tokenizer"
VAE: Final = "vae"
HIGH: Final = "transformer"
LOW: Final = "transformer_2"
SCHEDULER: Final = "scheduler"
FILES: Final = ("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors")
TEXT_FILES: Final = ("model.safetensors.index.json", "model.safetensors")
"""Weight files of a component, and of the text encoder."""

IMAGE_TO_VIDEO: Final = "WanImageToVideoPipeline"
TRAINED_STEPS: Final = 1000
"""Scale of timesteps: noise of level 1 is timestep 1000."""

SOLVER: Final[Mapping[str, Any]] = {
    "solver_order": 2,
    "solver_type": "bh2",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "final_sigmas_type": "zero",
}
"""Values of the scheduler's file that the solver implements. A file with others is refused."""

MEAN_48: Final = (
    *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891),
    *(0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
    *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723),
    *(-0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
)
STD_48: Final = (
    *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901),
    *(0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
    *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944),
    *(0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
)
MEAN_16: Final = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
STD_16: Final = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSizes:
    """Sizes of the UMT5 encoder. Defaults: UMT5-XXL."""

    width: int = 4096
    head_dim: int = 64
    inner: int = 10240
    layers: int = 24
    heads: int = 64
    vocab: int = 256384
    buckets: int = 32
    max_distance: int = 128
    eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSizes:
    """Sizes of a transformer. Defaults: TI2V-5B. inputs, outputs: latent channels in and out."""

    heads: int = 24
    head_dim: int = 128
    layers: int = 30
    inner: int = 14336
    inputs: int = 48
    outputs: int = 48
    text: int = 4096
    frequencies: int = 256
    eps: float = 1e-6
    max_positions: int = 1024
    patch: int = 2

    @property
    def width(self) -> int:
        """Values of a token."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeSizes:
    """Sizes of the autoencoder. Defaults: VAE 2.2. is_residual: VAE 2.2, else 2.1. fold: pixels folded per side."""

    base: int = 160
    decoder_base: int = 256
    channels: int = 48
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    blocks: int = 2
    temporal: tuple[bool, ...] = (False, True, True)
    is_residual: bool = True
    fold: int = 2
    mean: tuple[float, ...] = MEAN_48
    std: tuple[float, ...] = STD_48

    @property
    def pixels(self) -> int:
        """Pixels per latent value and axis."""
        return self.fold << (len(self.multipliers) - 1)

    @property
    def frames(self) -> int:
        """Frames per latent frame behind the first one."""
        return 1 << sum(self.temporal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a checkpoint. Defaults: TI2V-5B.

    boundary: share of the noise from which `transformer` runs instead of `transformer_2`; None without a second
    expert. expands: whether an image replaces the first latent frame, with timesteps of its own (TI2V). takes_image:
    whether an image is required, in further channels (I2V).
    """

    text: TextSizes = field(default_factory=TextSizes)
    transformer: TransformerSizes = field(default_factory=TransformerSizes)
    vae: VaeSizes = field(default_factory=VaeSizes)
    boundary: float | None = None
    expands: bool = True
    takes_image: bool = False
    flow_shift: float = 5.0

    @property
    def side_multiple(self) -> int:
        """Pixels that width and height are multiples of."""
        return self.vae.pixels * self.transformer.patch

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        """Whether there are two experts, timesteps per token, and a required image."""
        return self.has_experts, self.expands, self.takes_image

    @property
    def reads_image(self) -> bool:
        """Whether an image may condition a video."""
        return self.expands or self.takes_image

    @property
    def most_tokens(self) -> int:
        """Most tokens of a video that a deployment accepts by default: a little above the largest official one."""
        return 32768 if self.expands else 81920

    @property
    def has_experts(self) -> bool:
        """Whether there are two transformers."""
        return self.boundary is not None


A14B: Final = Sizes(
    transformer=TransformerSizes(heads=40, layers=40, inner=13824, inputs=16, outputs=16),
    vae=VaeSizes(base=96, decoder_base=96, channels=16, is_residual=False, fold=1, mean=MEAN_16, std=STD_16),
    boundary=0.875,
    expands=False,
    flow_shift=3.0,
)
"""Sizes of T2V-A14B."""

I2V_A14B: Final = replace(A14B, transformer=replace(A14B.transformer, inputs=36), boundary=0.9, takes_image=True)
"""Sizes of I2V-A14B."""


def read_sizes(folder: Path) -> Sizes:
    """Read the sizes of the checkpoint in `folder`. Raises WeightsError with file and key."""
    index = _json(folder / INDEX)
    name, has_low = str(index.get("_class_name")), _is_present(index, LOW)
    if name not in ("WanPipeline", IMAGE_TO_VIDEO):
        raise _unsupported(folder / INDEX, "_class_name", name, f"WanPipeline or {IMAGE_TO_VIDEO}")
    if has_low and not isinstance(index.get("boundary_ratio"), (int, float)):
        raise _unsupported(folder / INDEX, "boundary_ratio", index.get("boundary_ratio"), "a number from 0 to 1")
    expands = bool(index.get("expand_timesteps", False))
    sizes = Sizes(
        text=_text(folder / TEXT / "config.json"),
        transformer=_transformer(folder / HIGH / "config.json"),
        vae=_vae(folder / VAE / "config.json"),
        boundary=float(index["boundary_ratio"]) if has_low else None,
        expands=expands,
        takes_image=name == IMAGE_TO_VIDEO and not expands,
        flow_shift=_flow_shift(folder / SCHEDULER / "scheduler_config.json"),
    )
    if has_low and _transformer(folder / LOW / "config.json") != sizes.transformer:
        raise WeightsError(
            f"{folder} has two transformers of different sizes",
            hint="download the whole repository again",
            file=str(folder / LOW / "config.json"),
        )
    return sizes


def _transformer(path: Path) -> TransformerSizes:
    config, base = _json(path), TransformerSizes()
    for key in ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len"):
        if config.get(key) is not None:
            raise _unsupported(path, key, config[key], "null; Wan 2.1 image to video is not supported")
    for key, wanted in (("cross_attn_norm", True), ("qk_norm", "rms_norm_across_heads"), ("patch_size", [1, 2, 2])):
        if config.get(key, wanted) != wanted:
            raise _unsupported(path, key, config[key], repr(wanted))
    return TransformerSizes(
        heads=config.get("num_attention_heads", base.heads),
        head_dim=config.get("attention_head_dim", base.head_dim),
        layers=config.get("num_layers", base.layers),
        inner=config.get("ffn_dim", base.inner),
        inputs=config.get("in_channels", base.inputs),
        outputs=config.get("out_channels", base.outputs),
        text=config.get("text_dim", base.text),
        frequencies=config.get("freq_dim", base.frequencies),
        eps=config.get("eps", base.eps),
        max_positions=config.get("rope_max_seq_len", base.max_positions),
    )


def _vae(path: Path) -> VaeSizes:
    """Return the autoencoder's sizes; missing fields have the values of VAE 2.1."""
    config = _json(path)
    if config.get("attn_scales"):
        raise _unsupported(path, "attn_scales", config["attn_scales"], "[]")
    base, channels = config.get("base_dim", 96), config.get("z_dim", 16)
    return VaeSizes(
        base=base,
        decoder_base=config.get("decoder_base_dim") or base,
        channels=channels,
        multipliers=tuple(config.get("dim_mult", (1, 2, 4, 4))),
        blocks=config.get("num_res_blocks", 2),
        temporal=tuple(config.get("temperal_downsample", (False, True, True))),
        is_residual=bool(config.get("is_residual", False)),
        fold=config.get("patch_size") or 1,
        mean=tuple(config.get("latents_mean", MEAN_16))[:channels],
        std=tuple(config.get("latents_std", STD_16))[:channels],
    )


def _text(path: Path) -> TextSizes:
    config, base = _json(path), TextSizes()
    if config.get("feed_forward_proj", "gated-gelu") != "gated-gelu":
        raise _unsupported(path, "feed_forward_proj", config["feed_forward_proj"], "gated-gelu")
    return TextSizes(
        width=config.get("d_model", base.width),
        head_dim=config.get("d_kv", base.head_dim),
        inner=config.get("d_ff", base.inner),
        layers=config.get("num_layers", base.layers),
        heads=config.get("num_heads", base.heads),
        vocab=config.get("vocab_size", base.vocab),
        buckets=config.get("relative_attention_num_buckets", base.buckets),
        max_distance=config.get("relative_attention_max_distance", base.max_distance),
        eps=config.get("layer_norm_epsilon", base.eps),
    )


def _flow_shift(path: Path) -> float:
    config = _json(path)
    for key, wanted in SOLVER.items():
        if config.get(key, wanted) != wanted:
            raise _unsupported(path, key, config[key], repr(wanted))
    return float(config.get("flow_shift", 5.0))


def _is_present(index: Mapping[str, Any], component: str) -> bool:
    value = index.get(component)
    return isinstance(value, list) and len(value) == 2 and value[1] is not None


def _json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"{path} is missing", hint="give the folder of a checkpoint", file=str(path)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path} cannot be read", repr(error), "download it again", file=str(path)) from error
    if not isinstance(fields, dict):
        raise WeightsError(f"{path} must hold a JSON object", hint="download it again", file=str(path))
    return fields


def _unsupported(path: Path, key: str, value: object, wanted: str) -> WeightsError:
    return WeightsError(
        f"{path}: {key} is {value!r}", f"supported is {wanted}", "use another checkpoint", file=str(path)
    )
