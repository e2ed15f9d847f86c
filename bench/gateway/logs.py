"""Logs of a gateway and its deployments after the benchmark: wakes, starts, sleeps, and a copy of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from bench.gateway.models import MODELS
from bench.serving.figures import at, median

_MOVED: Final = re.compile(r"([\w.-]+) was (woken|loaded) in ([0-9.]+) s")
MOST_BYTES: Final = 4 << 20
"""End of each log that is copied."""


def moves(state_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the wakes and loads in the gateway's log: model and seconds, its wait for room included."""
    found: dict[str, list[dict[str, Any]]] = {"woken": [], "loaded": []}
    for path in sorted((state_dir / "gateway").rglob("gateway.log")):
        for name, how, took_s in _MOVED.findall(path.read_text(encoding="utf-8", errors="replace")):
            found[how].append({"model": name, "s": float(took_s)})
    return found


def events(state_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one type of all deployments, such as `deployment.sleeps`, with their model."""
    found = []
    for name in MODELS:
        for path in sorted((state_dir / name).rglob("events.ndjson")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                event = json.loads(line)
                if event.get("type") == kind:
                    found.append({"model": name, **event})
    return found


def spread(values: Iterable[float]) -> dict[str, Any] | None:
    """Return median, p99 and extremes of seconds, whatever their number; None without one."""
    ordered = sorted(values)
    if not ordered:
        return None
    found = {"p50": median(ordered), "p99": at(ordered, 0.99), "min": ordered[0], "max": ordered[-1]}
    return {**{name: round(value, 3) for name, value in found.items()}, "n": len(ordered)}


def by_model(items: Iterable[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Return the spread of a value for all models and for each."""
    values: dict[str, list[float]] = {"all": []}
    for item in items:
        if item.get(key) is not None:
            for name in ("all", item["model"]):
                values.setdefault(name, []).append(float(item[key]))
    return {name: found for name, numbers in values.items() if (found := spread(numbers)) is not None}


def copy_logs(state_dir: Path, folder: Path) -> None:
    """Copy the end of every log and event file into one folder, named by deployment, start and file."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(state_dir.rglob("*")):
        if path.suffix in (".log", ".ndjson") and path.is_file():
            name = "_".join(path.relative_to(state_dir).parts)
            (folder / name.replace(":", "-")).write_bytes(path.read_bytes()[-MOST_BYTES:])
    shutil.make_archive(str(folder), "gztar", folder)
