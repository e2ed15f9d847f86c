"""Which devices a deployment gets. Found without torch, which would cost more than a second. Used by plan.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from mstar_core.errors import ConfigError, PluginError, UsageError, did_you_mean

KINDS: Final = ("cpu", "cuda")
SMI_TIMEOUT_S: Final = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Entry i is for rank i; ("cpu",) serves every rank. why: how they were chosen, for people."""

    names: tuple[str, ...]
    why: str

    @property
    def kind(self) -> str:
        return self.names[0].partition(":")[0]


def choose_devices(kind: str | None, gpus: str | None, gpu_count: int, torch_version: str | None) -> Devices:
    """The devices for `--device` and `--gpus` on a host with so many GPUs.

    torch_version: None when torch is not installed. Raises UsageError for wrong words, ConfigError for what is missing.
    """
    if kind is not None and kind not in KINDS:
        raise UsageError(f"no device {kind!r}", hint=did_you_mean(kind, KINDS))
    if torch_version is None:
        raise PluginError(
            "torch is not installed", "workers compute with it", "pip install 'mstarctl[runtime]'", plugin=""
        )
    if kind == "cpu":
        if gpus is not None:
            raise UsageError("--gpus and --device cpu exclude each other", hint="leave one of them out")
        return Devices(names=("cpu",), why="asked for")
    is_cpu_build = torch_version.endswith("+cpu")
    if kind is None and gpus is None and (gpu_count == 0 or is_cpu_build):
        why = "no GPU was found" if gpu_count == 0 else f"torch {torch_version} is built without CUDA"
        return Devices(names=("cpu",), why=why)
    asked = "--device cuda" if kind == "cuda" else f"--gpus {gpus}" if gpus is not None else "a GPU"
    if gpu_count == 0:
        raise ConfigError(
            f"{asked} was asked for and no GPU was found", _seen(), "leave it out, or use --device cpu", key="device"
        )
    if is_cpu_build:
        raise ConfigError(
            f"{asked} was asked for and torch {torch_version} is built without CUDA",
            hint="install a CUDA build of torch",
            key="device",
        )
    chosen = _listed(gpus, gpu_count)
    return Devices(names=tuple(f"cuda:{index}" for index in chosen), why=f"{gpu_count} visible")


def _listed(gpus: str | None, count: int) -> tuple[int, ...]:
    if gpus is None:
        return tuple(range(count))
    word, colon, number = gpus.partition(":")
    if word == "auto":
        wanted = count if not colon else int(number) if number.isdigit() else 0
        if not 1 <= wanted <= count:
            raise ConfigError(
                f"--gpus {gpus} asks for {number or 'none'}", f"{count} are visible", f"--gpus auto:{count}", key="gpus"
            )
        return tuple(range(wanted))
    parts = [part.strip() for part in gpus.split(",")]
    if not all(part.isdigit() for part in parts):
        raise UsageError(f"--gpus is {gpus!r}", hint="write indices such as 0,1, or auto:2")
    chosen = tuple(int(part) for part in parts)
    for index in chosen:
        if index >= count:
            raise ConfigError(f"there is no GPU {index}", f"{count} visible: 0 to {count - 1}", key="gpus")
    return chosen


def _seen() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "neither nvidia-smi nor /dev shows one" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"


def count_gpus() -> int:
    """GPUs that processes started here will see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(gpu_names())
    if visible is None:
        return present
    listed = [part for part in visible.split(",") if part.strip()]
    until_bad = next((i for i, part in enumerate(listed) if part.strip() == "-1"), len(listed))
    return min(until_bad, present)


def gpu_names() -> list[str]:
    """GPUs of this host, one line each; device files when the driver's tool is missing."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            found = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            found = None
        if found is not None and found.returncode == 0:
            return [line.strip() for line in found.stdout.splitlines() if line.startswith("GPU ")]
    return sorted(path.name for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def torch_version() -> str | None:
    """The installed torch, by its metadata; None when there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
