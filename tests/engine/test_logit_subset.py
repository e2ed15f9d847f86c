"""A head that was cut down to the ids that can be drawn: the same draws as with all other ids at minus infinity."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.sampling.logit_subset import LogitSubset
from mstar_core.errors import ConfigError, EngineError
from mstar_core.graph.declare.nodes import NodeSpec, Sampling
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.tiny_engine import LM, VOCAB, Driver, TinyLM, generate, make_engine, prompt

DRAWABLE = (range(4, 5), range(11, 40, 2), range(47, 52))
IDS = [token for span in DRAWABLE for token in span]
OTHERS = tuple(range(token, token + 1) for token in range(VOCAB) if token not in IDS)
RULES = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=5),
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(temperature=1.2, top_p=0.6, repetition_penalty=0.9, seed=-4),
)
CUT_OFF = (
    SamplingParams(temperature=1.0, top_k=3, repetition_penalty=1.2, seed=2),
    SamplingParams(temperature=1.1, min_p=0.1, seed=8),
)


def limited(sampling: Sampling) -> NodeSpec:
    return replace(LM, sampling=sampling)


def restricted(**changes: object) -> KVCacheEngine:
    module = TinyLM(sharpness=2.0)
    module.out.restrict(DRAWABLE)
    return make_engine(spec=limited(Sampling(port="token", vocabulary=DRAWABLE)), module=module, **changes)


def masked(**changes: object) -> KVCacheEngine:
    spec = limited(Sampling(port="token", suppress=OTHERS))
    return make_engine(spec=spec, module=TinyLM(sharpness=2.0), **changes)


def requests(rules: tuple[SamplingParams, ...]) -> list[tuple[list[int], int, SamplingParams]]:
    """Prompts of any ids, long enough that the penalty meets many."""
    return [(prompt(seed, 4 + 3 * seed), 30, rule) for seed, rule in enumerate(rules)]


@pytest.mark.parametrize("graphs", [(), (1, 8)], ids=["plain", "fixed shapes"])
@pytest.mark.parametrize("rules", [RULES, CUT_OFF], ids=["usual", "top-k and min-p"])
def test_ids_equal_those_with_all_others_at_minus_infinity(
    rules: tuple[SamplingParams, ...], graphs: tuple[int, ...]
) -> None:
    expected = generate(requests(rules), engine=masked(graphs=()))
    assert generate(requests(rules), engine=restricted(graphs=graphs)) == expected
    drawn = {token for row in expected for token in row}
    assert drawn <= set(IDS) and len(drawn) > 8


def test_suppressed_ids_are_left_out_of_the_drawable_ones() -> None:
    spec = limited(Sampling(port="token", vocabulary=DRAWABLE, suppress=(range(11, 30), range(50, 53))))
    module = TinyLM(sharpness=1.0)
    module.out.restrict(DRAWABLE)
    for graphs in ((), (8,)):
        rows = generate(requests(RULES), engine=make_engine(spec=spec, module=module, graphs=graphs))
        assert {token for row in rows for token in row} <= {4, *range(31, 40, 2), 47, 48, 49}


def test_a_column_becomes_its_id_and_a_bad_row_stays_one() -> None:
    columns = LogitSubset(limited(Sampling(port="token", vocabulary=DRAWABLE)), VOCAB, torch.device("cpu"))
    assert columns.drawn(torch.tensor([-1, 0, 1, columns.count - 1])).tolist() == [-1, 4, 11, 51]


def test_logits_of_the_whole_vocabulary_are_refused_and_harm_no_other() -> None:
    driver = Driver(restricted())
    for handle in range(2):
        driver.open(handle)
    asks = driver.prefill(0, prompt(1, 5), outputs=("token", "logits"))
    fine = driver.prefill(1, prompt(2, 5))
    driver.run()
    error = driver.failed[asks].error
    assert isinstance(error, EngineError) and "whole vocabulary" in str(error) and fine in driver.done


def test_a_head_of_other_rows_is_refused() -> None:
    driver = Driver(make_engine(spec=limited(Sampling(port="token", vocabulary=DRAWABLE))))
    driver.open(0)
    asks = driver.prefill(0, prompt(1, 5))
    driver.run()
    assert f"{VOCAB} columns, not {len(IDS)}" in str(driver.failed[asks].error)


@pytest.mark.parametrize(
    "spans", [(range(5, 9), range(8, 12)), (range(9, 5),), (range(40, VOCAB + 1),), (range(5), range(3))]
)
def test_ids_that_do_not_ascend_or_leave_the_vocabulary_are_refused(spans: tuple[range, ...]) -> None:
    with pytest.raises(ConfigError, match="do not fit its vocabulary of 53"):
        make_engine(spec=limited(Sampling(port="token", vocabulary=spans)))
