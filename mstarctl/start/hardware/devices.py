"""Choice of a deployment's devices from `--device` and `--gpus`. Used by the planner."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from mstar_core.errors import ConfigError, PluginError, UsageError, did_you_mean
from mstarctl.output.units import counted

KINDS: Final = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Devices of ranks: entry i is for rank i; ("cpu",) serves every rank. why: the reason for the choice, as text."""

    names: tuple[str, ...]
    why: str

    @property
    def kind(self) -> str:
        return self.names[0].partition(":")[0]


def choose_devices(kind: str | None, gpus: str | None, gpu_count: int, torch_version: str | None) -> Devices:
    """Return the devices for `--device` and `--gpus` on a host with `gpu_count` GPUs.

    torch_version: None if torch is not installed. Raises UsageError for invalid values, ConfigError for missing GPUs.
    """
    if kind is not None and kind not in KINDS:
        raise UsageError(f"unknown device {kind!r}", hint=did_you_mean(kind, KINDS))
    is_cpu_build = has_no_cuda(torch_version)
    if kind == "cpu":
        if gpus is not None:
            raise UsageError("--gpus and --device cpu exclude each other", hint="omit one of them")
        return Devices(names=("cpu",), why="as requested")
    if kind is None and gpus is None and (gpu_count == 0 or is_cpu_build):
        why = "no GPU was found" if gpu_count == 0 else f"torch {torch_version} is built without CUDA"
        return Devices(names=("cpu",), why=why)
    request = "--device cuda" if kind == "cuda" else f"--gpus {gpus}" if gpus is not None else "a GPU"
    if gpu_count == 0:
        raise ConfigError(
            f"{request} was requested, but no GPU was found", _evidence(), "omit it, or use --device cpu", key="device"
        )
    if is_cpu_build:
        raise ConfigError(
            f"{request} was requested, but torch {torch_version} is built without CUDA",
            hint="install a CUDA build of torch",
            key="device",
        )
    chosen = _indices(gpus, gpu_count)
    return Devices(names=tuple(f"cuda:{index}" for index in chosen), why=f"{gpu_count} visible")


def has_no_cuda(torch_version: str | None) -> bool:
    """Return whether torch is built without CUDA. Raises PluginError if it is not installed."""
    if torch_version is None:
        raise PluginError("torch is not installed", "workers need it", "pip install 'mstarctl[runtime]'", plugin="")
    return torch_version.endswith("+cpu")


def _indices(gpus: str | None, count: int) -> tuple[int, ...]:
    if gpus is None:
        return tuple(range(count))
    word, colon, number = gpus.partition(":")
    if word == "auto":
        index_or_count = count if not colon else int(number) if number.isdigit() else 0
        if not 1 <= index_or_count <= count:
            raise ConfigError(
                f"--gpus {gpus} requests {number or 'no'} GPUs",
                f"{counted(count, 'GPU')} visible",
                f"--gpus auto:{count}",
                key="gpus",
            )
        return tuple(range(index_or_count))
    parts = [part.strip() for part in gpus.split(",")]
    if not all(part.isdigit() for part in parts):
        raise UsageError(f"--gpus is {gpus!r}", hint="write indices such as 0,1 or auto:2; HOST:INDEX needs --ray")
    chosen = tuple(int(part) for part in parts)
    for index in chosen:
        if index >= count:
            raise ConfigError(f"GPU {index} does not exist", f"visible are 0 to {count - 1}", key="gpus")
    return chosen


def _evidence() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "neither nvidia-smi nor /dev lists one" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"


def torch_version() -> str | None:
    """Return the version of the installed torch from its metadata, which needs no import; None if not installed."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
