"""Graphs that record on the CPU: a replay runs the step again and leaves the result where the first run left it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mstar_core.engine.cuda_graphs.cache import GraphCache, Size
from mstar_core.engine.cuda_graphs.kinds import StepFamily, StepKind
from mstar_core.engine.kv.engine import KVCacheEngine


class Recorded:
    """Replaces a CUDA graph: outputs stay in one place, and the next replay overwrites them."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self.outputs = step()
        self.replays = 0
        for value in _tensors(self.outputs):
            value.fill_(float("nan") if value.is_floating_point() else 0)

    def replay(self) -> None:
        self.replays += 1
        for place, value in zip(_tensors(self.outputs), _tensors(self._step()), strict=True):
            place.copy_(value)


def _tensors(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, list):
        return [value for each in outputs for value in _tensors(each)]
    return list(outputs.values()) if isinstance(outputs, dict) else [outputs]


def captured_kinds(engine: KVCacheEngine, family: StepFamily | None = None) -> dict[StepKind, list[Size]]:
    """Return the captured buckets of an engine's passes by kind: (tokens, batch items, pages), ascending."""
    graphs = engine._runner.graphs
    assert graphs is not None
    return {kind: sizes for kind, sizes in graphs.passes.kinds.items() if family in (None, kind.family)}


def captured_tokens(engine: KVCacheEngine, family: StepFamily) -> list[int]:
    """Return the tokens of the captured buckets of a family, ascending."""
    return [tokens for sizes in captured_kinds(engine, family).values() for tokens, _, _ in sizes]


class RecordingCache(GraphCache):
    """Makes such graphs. With `fails` set, nothing can be captured."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.graphs: list[Recorded] = []
        self.fails: Exception | None = None

    def capture(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        if self.fails is not None:
            raise self.fails
        made = Recorded(step)
        self.graphs.append(made)
        return made, made.outputs
