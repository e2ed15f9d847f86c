"""Specs of all families, and a driver that records the wishes of a program."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mstar_core.graph import MAIN, Loop, loops
from mstar_core.plugin import Fork, ModelSpec, Partition, ProgramRequest, Run, Sample, Signal, WalkResult
from mstar_core.plugin.check.dry_run import sample_request

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.name.replace("-", "_") for path in ROOT.glob("plugins/*/pyproject.toml"))


def all_specs() -> dict[str, ModelSpec]:
    """Every model of every plugin, by name."""
    found: dict[str, ModelSpec] = {}
    for package in PACKAGES:
        module: Any = importlib.import_module(f"{package}.plugin")
        found |= {spec.name: spec for spec in module.mstar_models()}
    return found


SPECS = all_specs()
SAMPLES = [(name, sample.name) for name, spec in SPECS.items() for sample in spec.samples]


def sample_of(model: str, name: str) -> Sample:
    """The sample called `name`."""
    return next(sample for sample in SPECS[model].samples if sample.name == name)


def wishes(model: str, sample: str, ended: Mapping[str, str] | None = None) -> dict[str, list[Run | Fork]]:
    """Return the wishes of each partition that the sample starts, with lists flattened. ended: reason by walk."""
    spec = SPECS[model]
    request = sample_request(spec, sample_of(model, sample))
    return {part.name: _drive(part, request, ended or {}) for part in spec.active_partitions(request)}


def told(wanted: list[Run | Fork]) -> list[str]:
    """Wishes as text: `walk`, `walk main+cfg_img` when branches are not main alone, `main > cfg_text` for a fork."""
    return [_told(wish) for wish in wanted]


def _told(wish: Run | Fork) -> str:
    if isinstance(wish, Fork):
        return f"{wish.source} > {wish.into}"
    return wish.walk if wish.branches == (MAIN,) else f"{wish.walk} {'+'.join(wish.branches)}"


def _drive(partition: Partition, request: ProgramRequest, ended: Mapping[str, str]) -> list[Run | Fork]:
    program, answer, found = partition.program(request), None, []
    try:
        while True:
            wish: Any = program.send(answer)
            found += wish if isinstance(wish, list) else [wish]
            answer = _answer(wish, ended)
    except StopIteration:
        return found


def _answer(wish: Any, ended: Mapping[str, str]) -> Any:
    match wish:
        case Fork():
            return None
        case list():
            return [_answer(run, ended) for run in wish]
        case _:
            kept = {port: Signal(port=port, key=7) for port in wish.keep}
            return WalkResult(reason=ended.get(wish.walk, "stop"), counts={}, signals=kept)


def loop_of(model: str, walk: str, name: str) -> Loop:
    """The loop called `name` of a walk."""
    return next(loop for loop in loops(SPECS[model].walk(walk)[1]) if loop.name == name)
