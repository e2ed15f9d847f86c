"""A bucket that decode steps miss is captured next, while requests run and between their steps."""

from __future__ import annotations

import pytest
import torch

from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.late_warmup import LateWarmup
from tests.engine.tiny_engine import Driver, TinyLM, make_engine, prompt

pytestmark = pytest.mark.gpu

MOST_TURNS = 40
"""Turns within which the bucket must be there: most of them are those of the first prompts."""


def test_a_missed_bucket_is_captured_within_a_few_steps_under_load(cuda: torch.device) -> None:
    sizes = CaptureSizes(decode=(1,), decode_later=(2, 4, 8, 16), prefill=(64,), prefill_later=(32,))
    engine = make_engine(device=cuda, module=TinyLM().to(cuda), lookahead=1, graphs=sizes)
    late = LateWarmup(runners={"LM": engine})
    driver = Driver(engine, lookahead=1)
    assert not late.is_due()
    for handle in range(3):
        driver.open(handle)
        driver.prefill(handle, prompt(handle, 3))
        driver.decode(handle, 48)
    graphs = engine._runner.graphs
    assert graphs is not None and graphs.decode is not None
    turns = 0
    while (4,) not in graphs.decode.buckets.sizes:
        turns += 1
        assert turns <= MOST_TURNS and driver.running is not None
        if late.is_due():
            while driver.running:
                driver.collect()
            late.work()
        assert driver.turn(), "the load has ended before"
    while driver.running:  # launched before the capture
        driver.collect()
    missed = engine.counters()["graph_misses"]
    driver.run()
    assert not driver.failed and engine.counters()["graph_misses"] == missed
    assert (2,) not in graphs.decode.buckets.sizes, "only the missed bucket went first"
