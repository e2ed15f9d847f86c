"""Memory of a long run: flat in the client processes, whatever its length."""

from __future__ import annotations

import os

import pytest

from mstarctl.bench.load.plan import Load
from mstarctl.bench.null_server import NullBehaviour
from tests.cli.bench.conftest import NullRun

GROWTH_BYTES = 8 << 20


def flat(null_run: NullRun, span_s: float) -> None:
    load = Load(rate=50.0, span_s=span_s, warm_up=20)
    facts, _ = null_run(NullBehaviour(delay_s=0.02, lines=20, gap_s=0.005, line_bytes=4096), load)
    client = facts["client"]
    print(client)
    assert facts["statuses"] == {"ok": facts["intended"]}
    assert client["rss_bytes_last"] - client["rss_bytes_first"] < GROWTH_BYTES


def test_memory_is_flat_over_seconds(null_run: NullRun) -> None:
    flat(null_run, 5.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_flat_over_ten_minutes(null_run: NullRun) -> None:
    flat(null_run, float(os.environ.get("MSTAR_BENCH_SOAK_S", "600")))
