"""LoRA adapters of a rank: loaded at the start and while it serves, found by number, dropped."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mstar_core.config.deployment import AdapterPlan
from mstar_core.engine.base import NO_ADAPTER
from mstar_core.errors import EngineError, WeightsError
from mstar_core.layers.lora import AdapterLimits
from mstar_core.layers.transformer import adapt_layers
from mstar_core.messages.adapters import AdapterDone, LoadAdapter, UnloadAdapter
from mstar_core.worker.adapters import RankAdapters
from tests.engine.tiny_engine import TinyLM
from tests.fakes.adapters import write_adapter

LIMIT_S = 60.0


def rank() -> RankAdapters:
    return RankAdapters({"LM": adapt_layers(TinyLM(), AdapterLimits.of(2, 8))})


def plan(number: int, folder: Path, row: int = 0) -> AdapterPlan:
    return AdapterPlan(number=number, row=row, name=folder.name, folder=str(folder))


def answers(adapters: RankAdapters) -> list[AdapterDone]:
    found: list[AdapterDone] = []
    deadline = time.monotonic() + LIMIT_S
    while adapters.is_reading and time.monotonic() < deadline:
        adapters.finish(found.append)
        time.sleep(0.005)
    return found


def test_an_adapter_is_loaded_and_dropped_while_the_rank_serves(tmp_path: Path) -> None:
    adapters, folder = rank(), write_adapter(tmp_path / "a", TinyLM(), 1)
    adapters.begin(LoadAdapter(adapter=plan(7, folder, row=1)))
    assert answers(adapters) == [AdapterDone(number=7)]
    assert adapters.row(7) == 1 and adapters.row(0) == NO_ADAPTER
    (projections, _) = next(iter(adapters.banks["LM"].layers.values()))
    assert projections.down[1].any() and not projections.down[0].any()
    found: list[AdapterDone] = []
    adapters.unload(UnloadAdapter(number=7), found.append)
    assert found == [AdapterDone(number=7)] and not projections.down.any()
    with pytest.raises(EngineError, match="is not loaded"):
        adapters.row(7)
    adapters.close()


def test_an_adapter_that_does_not_fit_is_answered_with_its_cause(tmp_path: Path) -> None:
    adapters = rank()
    adapters.begin(LoadAdapter(adapter=plan(1, write_adapter(tmp_path / "wide", TinyLM(), 1, rank=40))))
    adapters.begin(LoadAdapter(adapter=plan(2, tmp_path / "missing")))
    first, second = sorted(answers(adapters), key=lambda done: done.number)
    assert first.title == "the adapter wide has rank 40" and "lora.max_rank=40" in first.hint
    assert "is no LoRA adapter" in second.title
    adapters.close()


def test_a_missing_adapter_fails_a_first_start_but_not_a_later_one(tmp_path: Path) -> None:
    plans = [plan(1, tmp_path / "gone"), plan(2, write_adapter(tmp_path / "kept", TinyLM(), 1), row=1)]
    with pytest.raises(WeightsError):
        rank().load_all(plans, is_first=True)
    adapters = rank()
    adapters.load_all(plans, is_first=False)
    assert adapters.row(2) == 1
    with pytest.raises(EngineError):
        adapters.row(1)
