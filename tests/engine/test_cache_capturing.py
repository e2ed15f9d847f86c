"""Recording a graph keeps the collector off, whatever becomes of the block, and replays it once. Graphs are a GPU's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mstar_core.engine.cuda_graphs.cache import capturing


class Graph:
    """A graph that counts its replays, and those of them that have ended."""

    def __init__(self) -> None:
        self.replays = self.ended = 0
        GRAPHS.append(self)

    def replay(self) -> None:
        self.replays += 1


GRAPHS: list[Graph] = []


def synchronize() -> None:
    """End all replays."""
    for graph in GRAPHS:
        graph.ended = graph.replays


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    @contextmanager
    def graph(made: object, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        found.append(capture_error_mode)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    GRAPHS.clear()
    return found


def test_nothing_is_collected_while_a_graph_is_recorded(modes: list[str]) -> None:
    with capturing():
        assert not gc.isenabled()
    assert gc.isenabled() and modes == ["thread_local"]


def test_a_recorded_graph_has_run_once_before_its_first_step(modes: list[str]) -> None:
    with capturing():
        assert GRAPHS[0].replays == 0
    assert GRAPHS[0].replays == GRAPHS[0].ended == 1, "a step on another stream must not meet the replay"


def test_the_collector_is_on_again_after_an_error(modes: list[str]) -> None:
    with pytest.raises(ValueError, match="of the step"), capturing():
        raise ValueError("of the step")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off(modes: list[str]) -> None:
    gc.disable()
    try:
        with capturing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
