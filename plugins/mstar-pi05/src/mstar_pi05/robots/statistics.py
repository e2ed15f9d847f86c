"""Normalisation statistics of a checkpoint: openpi's norm_stats.json or lerobot's processor files.

Standard library only, so that unknown or damaged statistics fail before any process starts. Applied by
`conversion`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from mstar_core.errors import ConfigError, WeightsError, did_you_mean
from mstar_core.plugin.json_fields import JsonFields

NONE: Final = "none"
"""Value of `norm_stats` that disables the checkpoint's statistics."""

FILE: Final = "norm_stats.json"
LEROBOT: Final = (
    ("policy_preprocessor.json", "normalizer_processor", "STATE", "observation.state"),
    ("policy_postprocessor.json", "unnormalizer_processor", "ACTION", "action"),
)
OPENPI_EPSILON: Final = 1e-6
LEROBOT_EPSILON: Final = 1e-8
_FORMATS: Final[Mapping[str, str]] = {"F32": "f", "F64": "d"}

Span = Literal["range", "spread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Normalisation of one feature.

    span `range`: low and high map to -1 and 1 (quantiles, or minimum and maximum). span `spread`: low is the mean and
    high the standard deviation. epsilon is added to the divisor; with adds False it only replaces a divisor of zero.
    """

    span: Span
    low: tuple[float, ...]
    high: tuple[float, ...]
    epsilon: float = OPENPI_EPSILON
    adds: bool = True

    def __len__(self) -> int:
        return len(self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Statistics of one robot; None for a feature without normalisation. source: their file."""

    state: Moments | None
    actions: Moments | None
    source: Path


def find_statistics(folder: Path, name: str | None) -> Statistics | None:
    """Return the statistics of a deployment.

    name: an asset id, a file or its folder (absolute, or within the checkpoint), `none`, or None for the only set of
    the checkpoint, if it has one. Raises ConfigError for an unknown or ambiguous choice and WeightsError for a damaged
    file.
    """
    if name == NONE:
        return None
    assets = _assets(folder)
    if name is None:
        return _only(folder, assets)
    if name in assets:
        return read_norm_stats(assets[name])
    path = folder / name  # an absolute path replaces the folder
    path = path / FILE if path.is_dir() else path
    if path.is_file():
        return read_norm_stats(path)
    hint = did_you_mean(name, [*assets, NONE]) + "; a path to a norm_stats.json is valid too"
    raise ConfigError(f"unknown statistics {name!r}", f"looked in {folder}", hint, key="model_kwargs.norm_stats")


def _only(folder: Path, assets: Mapping[str, Path]) -> Statistics | None:
    statistics = read_lerobot(folder)
    if statistics is not None:
        return statistics
    if len(assets) > 1:
        hint = f"set model_kwargs.norm_stats to one of: {', '.join([*assets, NONE])}"
        raise ConfigError(
            f"{folder} contains statistics of {len(assets)} robots", hint=hint, key="model_kwargs.norm_stats"
        )
    return read_norm_stats(*assets.values()) if assets else None


def _assets(folder: Path) -> dict[str, Path]:
    """Return the statistics files of an openpi folder by asset id, which may contain a slash."""
    root = folder / "assets"
    paths = {path.parent.relative_to(root).as_posix(): path for path in sorted(root.rglob(FILE))}
    paths.pop(".", None)
    return {**paths, **({FILE: folder / FILE} if (folder / FILE).is_file() else {})}


def read_norm_stats(path: Path) -> Statistics:
    """Read openpi's file. Pi0.5 uses its quantiles. Raises WeightsError naming file and key."""
    content = JsonFields.read(path).values
    features = content.get("norm_stats", content)
    if not isinstance(features, dict) or not {"state", "actions"} & set(features):
        raise _damaged(path, "it contains neither state nor actions")
    quantiles = [_quantiles(features.get(name), path, name) for name in ("state", "actions")]
    return Statistics(state=quantiles[0], actions=quantiles[1], source=path)


def _quantiles(feature: Any, path: Path, name: str) -> Moments | None:
    if feature is None:
        return None
    low, high = (_numbers(feature, key, path, name) for key in ("q01", "q99"))
    if len(low) != len(high):
        raise _damaged(path, f"{name} has {len(low)} values of q01 and {len(high)} of q99")
    return Moments(span="range", low=low, high=high)


def _numbers(feature: Any, key: str, path: Path, name: str) -> tuple[float, ...]:
    values = feature.get(key) if isinstance(feature, dict) else None
    if not isinstance(values, list) or not values:
        raise _damaged(path, f"{name} has no {key}")
    if any(isinstance(v, bool) or not isinstance(v, int | float) or not math.isfinite(v) for v in values):
        raise _damaged(path, f"{name}.{key} must contain finite numbers only")
    return tuple(float(value) for value in values)


def read_lerobot(folder: Path) -> Statistics | None:
    """Read the statistics in lerobot's processor files; None without any. Raises WeightsError."""
    features = [_lerobot_feature(folder, *place) for place in LEROBOT]
    if features == [None, None]:
        return None
    return Statistics(state=features[0], actions=features[1], source=folder / LEROBOT[0][0])


def _lerobot_feature(folder: Path, file: str, step_name: str, kind: str, feature: str) -> Moments | None:
    path = folder / file
    if not path.is_file():
        return None
    for step in JsonFields.read(path).get("steps", ()):
        if not isinstance(step, dict) or step.get("registry_name") != step_name or not step.get("state_file"):
            continue
        config = step.get("config") or {}
        mode = (config.get("norm_map") or {}).get(kind, "IDENTITY")
        if mode == "IDENTITY":
            return None
        return _of_mode(folder / str(step["state_file"]), feature, str(mode), config.get("eps", LEROBOT_EPSILON))
    return None


def _of_mode(path: Path, feature: str, mode: str, epsilon: Any) -> Moments | None:
    names = {"QUANTILES": ("q01", "q99"), "MIN_MAX": ("min", "max"), "MEAN_STD": ("mean", "std")}.get(mode)
    if names is None:
        raise _damaged(path, f"{feature} is normalised by {mode}, which is not supported")
    stored = read_vectors(path)
    keys = [f"{feature}.{name}" for name in names]
    if not any(key in stored for key in keys):
        return None  # a file without this feature means no normalisation
    low, high = (stored.get(key, ()) for key in keys)
    if len(low) != len(high):
        raise _damaged(path, f"{keys[0]} has {len(low)} values and {keys[1]} has {len(high)}")
    is_spread = mode == "MEAN_STD"
    return Moments(
        span="spread" if is_spread else "range",
        low=tuple(low),
        high=tuple(high),
        epsilon=float(epsilon),
        adds=is_spread,
    )


def read_vectors(path: Path) -> dict[str, Sequence[float]]:
    """Read every float32 and float64 tensor of a small safetensors file, flattened. Raises WeightsError."""
    try:
        data = path.read_bytes()
        start = 8 + int(struct.unpack_from("<Q", data)[0])
        header = json.loads(data[8:start])
        vectors: dict[str, Sequence[float]] = {}
        for name, entry in header.items():
            code = _FORMATS.get(entry.get("dtype", "")) if name != "__metadata__" else None
            if code is not None:
                begin, end = (start + int(offset) for offset in entry["data_offsets"])
                size = (end - begin) // struct.calcsize(code)
                vectors[name] = struct.unpack_from(f"<{size}{code}", data, begin)
        return vectors
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, detail: str) -> WeightsError:
    return WeightsError(f"{path} has no usable statistics", detail, "fetch this file again", file=str(path))
