"""The warm-up of a GPU rank runs every walk of the thinker and of the talker, streams between them included."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path

import pytest

from mstar_core.conformance.nodes import build_nodes
from mstar_core.conformance.runtime import LocalRuntime, RuntimeSettings
from mstar_core.engine.runner import NodeRunner
from mstar_core.messages.work import RunWalks
from mstar_core.plugin import ModelSpec
from mstar_core.worker.executor import Executor
from mstar_core.worker.start.warmup import REHEARSAL_S, REHEARSED, rehearse, warm_walks
from mstar_qwen3omni.plugin import mstar_models
from mstar_qwen3omni.sources.tiny import write_tiny

Tiny = tuple[ModelSpec, LocalRuntime]


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """The tiny checkpoint's spec, and its nodes on one worker without processes."""
    folder = write_tiny(tmp_path / "tiny")
    (model,) = mstar_models()
    spec = model.bound(folder, {})
    return spec, LocalRuntime(spec, folder, RuntimeSettings(slots=2), built=build_nodes(spec, folder))


def test_samples_run_every_walk_of_the_language_models(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec, served = tiny
    (worker,) = served.workers
    taken: set[str] = set()
    run = Executor.run

    def noted(executor: Executor, message: RunWalks) -> None:
        taken.update(run.walk for run in message.runs)
        run(executor, message)

    monkeypatch.setattr(Executor, "run", noted)
    with caplog.at_level("WARNING"):
        warm_walks(spec, 0, worker.runners, {"Thinker", "Talker"}, 1024, lambda sample: None)
    known = {walk for partition in spec.partitions for walk in partition.walks}
    assert taken == known and caplog.messages == [] and served.leaks() == []


def test_a_rehearsal_runs_every_walk_once_and_leaves_nothing(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every walk runs on captured steps with enough ids for a window of sound; counts and caches are as before."""
    spec, served = tiny
    (worker,) = served.workers
    before = state(worker.runners)
    taken: list[str] = []
    limits: dict[str, int] = {}
    run = Executor.run

    def noted(executor: Executor, message: RunWalks) -> None:
        taken.extend(run.walk for run in message.runs)
        for each in message.runs:
            limits.update({name: max(limits.get(name, 0), count) for name, count in each.max_iters.items()})
        run(executor, message)

    monkeypatch.setattr(Executor, "run", noted)
    named: list[str] = []
    with caplog.at_level("DEBUG", "mstar_core.worker.start.warmup"):
        rehearse(spec, 0, worker.runners, 1024, named.append, clock=lambda: 0.0)
    assert set(taken) == {walk for partition in spec.partitions for walk in partition.walks}
    assert len(named) < len(spec.samples), "a sample without a new walk does not run"
    assert limits["thinker_loop"] == limits["talker_loop"] == REHEARSED
    assert caplog.messages == [] and served.leaks() == [] and state(worker.runners) == before


def test_a_rehearsal_ends_in_time(tiny: Tiny) -> None:
    spec, served = tiny
    (worker,) = served.workers
    ticks = count(0.0, REHEARSAL_S)
    named: list[str] = []
    rehearse(spec, 0, worker.runners, 1024, named.append, clock=lambda: next(ticks))
    assert named == [], "each reading of the clock is the whole time later"


def state(runners: Mapping[str, NodeRunner]) -> dict[str, object]:
    """Return pages, slots and counters by node."""
    return {name: (runner.memory(), runner.counters()) for name, runner in runners.items()}
