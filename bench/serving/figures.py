"""Report of a measurement: samples by metric, percentiles and conditions."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from mstarctl.bench.environment import cpu_name, torch_cuda
from mstarctl.bench.result import without_folders

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("torch", "triton", "flashinfer-python", "numpy", "msgspec", "pyzmq", "sanic", "transformers")
LEAST_FOR: Final = {"p95": (0.95, 100), "p99": (0.99, 500)}
"""Percentile -> its fraction, and the minimum number of samples."""

PLACEHOLDERS: Final = {
    "--out": "OUT",
    "--folder": "WEIGHTS",
    "--weights": "WEIGHTS",
    "--tree": "TREE",
    "--compare-tree": "TREE",
    "--against": "TREE",
}
"""Option -> what stands for the folder of its path in a report."""


@dataclass(slots=True)
class Figures:
    """Samples by metric. Owned by one run."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, values: Iterable[float], unit: str = "s") -> None:
        """Append samples to a metric."""
        self.samples.setdefault(name, []).extend(values)
        self.units[name] = unit

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return every metric with samples, as the percentiles that their number allows."""
        return {name: summary(values, self.units[name]) for name, values in self.samples.items() if values}


def summary(values: Iterable[float], unit: str) -> dict[str, Any]:
    """Return median, p95 (from 100 samples on), p99 (from 500 on), extremes, count and unit, with six digits."""
    ordered = sorted(values)
    found = {"p50": median(ordered), "min": ordered[0], "max": ordered[-1]}
    found |= {name: at(ordered, share) for name, (share, least) in LEAST_FOR.items() if len(ordered) >= least}
    return {**{name: float(f"{value:.6g}") for name, value in found.items()}, "n": len(ordered), "unit": unit}


def median(ordered: list[float]) -> float:
    """Return the median of sorted values."""
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def at(ordered: list[float], share: float) -> float:
    """Return the quantile `share` of sorted values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def head() -> dict[str, Any]:
    """Return the date, source version, command and machine of a report."""
    return {
        "schema": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        **source(),
        "command": command(sys.argv),
        "env": environment(),
    }


def command(words: Sequence[str]) -> str:
    """Return the command line of a report, without paths of the host.

    A path inside the repository becomes relative to it. An absolute path outside keeps its last part, behind a name for
    its folder: one of PLACEHOLDERS, or `FOLDER`.
    """
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    options = ["", *words]
    return shlex.join(["python", *(_portable(word, before) for before, word in zip(options, words, strict=False))])


def source() -> dict[str, Any]:
    """Return the measured commit and whether the tree had changes; both None for a tree without history."""

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", *words], cwd=ROOT, check=False, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "-uno")
    return {"commit": git("rev-parse", "--short", "HEAD"), "dirty": None if status is None else bool(status)}


def environment() -> dict[str, Any]:
    """Describe the machine and the packages."""
    cores = len(os.sched_getaffinity(0))
    packages = {name: found for name in PACKAGES if (found := _version(name)) is not None}
    return {
        **gpu(),
        "torch": packages.pop("torch", None),
        "python": platform.python_version(),
        "packages": packages,
        "cpu": cpu_name(),
        "cores": cores,
        "load_before": round(os.getloadavg()[0], 2),
    }


def gpu() -> dict[str, Any]:
    """Return the GPU's name and driver by nvidia-smi, and torch's CUDA version; None without a GPU."""
    values: list[str] | list[None] = smi("name", "driver_version") or [None, None]
    return {"gpu": values[0], "driver": values[1], "cuda": torch_cuda()}


def smi(*fields: str) -> list[str]:
    """Return nvidia-smi's fields of the first GPU, without units; empty without a GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [value.strip() for value in done.stdout.strip().split(",")] if done.returncode == 0 else []


def write(report: Mapping[str, Any], samples: Mapping[str, list[float]], path: Path) -> None:
    """Write the report to `path`, without folders of this machine, and the raw samples beside it as `.samples.json`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(without_folders(dict(report)), indent=1) + "\n")
    raw = {name: [float(f"{value:.6g}") for value in values] for name, values in samples.items()}
    path.with_suffix(".samples.json").write_text(json.dumps(raw) + "\n")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _portable(word: str, option: str) -> str:
    key, equals, value = word.partition("=")
    if equals:
        return f"{key}={_portable(value, option)}"
    path = Path(word)
    if not path.is_absolute():
        return word
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return f"{PLACEHOLDERS.get(option, 'FOLDER')}/{path.name}"
