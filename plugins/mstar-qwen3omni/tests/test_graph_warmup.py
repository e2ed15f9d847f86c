"""The warm-up of a GPU rank runs every walk of the thinker and of the talker, streams between them included."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.conformance.nodes import build_nodes
from mstar_core.conformance.runtime import LocalRuntime, RuntimeSettings
from mstar_core.messages.work import RunWalks
from mstar_core.worker.executor import Executor
from mstar_core.worker.start.warmup import warm_walks
from mstar_qwen3omni.plugin import mstar_models
from mstar_qwen3omni.sources.tiny import write_tiny


def test_samples_run_every_walk_of_the_language_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny(tmp_path / "tiny")
    (model,) = mstar_models()
    spec = model.bound(folder, {})
    served = LocalRuntime(spec, folder, RuntimeSettings(slots=2), built=build_nodes(spec, folder))
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
