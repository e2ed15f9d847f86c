"""Null servers and runs against them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstarctl.bench.load.plan import Load
from mstarctl.bench.measure.load_metrics import Measures
from mstarctl.bench.null_server import NullBehaviour
from mstarctl.bench.result import ResultFolder
from mstarctl.bench.run import BenchRun, RunOptions
from mstarctl.bench.selftest import null_target, null_workload
from mstarctl.bench.show.display import Display

NullRun = Callable[..., tuple[dict[str, Any], ResultFolder]]


@pytest.fixture
def null_run(tmp_path: Path) -> NullRun:
    """Run a load against a null server; return its facts and its folder."""

    def run(behaviour: NullBehaviour, load: Load, **options: Any) -> tuple[dict[str, Any], ResultFolder]:
        out = tmp_path / f"result{len(list(tmp_path.iterdir()))}"
        settings = {"timeout_s": 10.0, "grace_s": 5.0, **options}
        run_options = RunOptions(
            load=load,
            workload=null_workload(),
            measures=Measures(is_late=load.is_open or load.period_s > 0),
            out=out,
            **settings,
        )
        with null_target(behaviour) as target, Display("quiet", is_coloured=False) as display:
            facts = BenchRun(target, run_options, display).perform()
        return facts, ResultFolder.opened(out)

    return run
