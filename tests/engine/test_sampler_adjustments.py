"""Logit bias, presence and frequency penalty: their arithmetic, their state per slot, and no effect on others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mstar_core.engine.base import Handle
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.errors import RequestError
from mstar_core.graph.declare.nodes import Sampling
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.tiny_engine import LM, VOCAB, Driver, TinyLM, generate, make_engine, prompt

BIASED = SamplingParams(logit_bias={7: 100.0, 9: 99.0})
PENALISED = SamplingParams(temperature=0.9, presence_penalty=1.5, frequency_penalty=0.5, seed=4)
PLAIN = SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.2, seed=5)
GRAPHS = [CaptureSizes(), CaptureSizes(decode=(1, 8), prefill=(16, 64))]
NAMES = ["plain", "fixed shapes"]


class Flat(TinyLM):
    """Gives the same logits at each place, so that adjustments alone choose the id."""

    def __init__(self, **logits: float) -> None:
        super().__init__()
        self.fixed = torch.full((VOCAB,), -50.0)
        for token, value in logits.items():
            self.fixed[int(token[1:])] = value

    def head(self, hidden: Tensor) -> Tensor:
        return self.fixed.expand(len(hidden), -1).clone()


def drawn(sampling: SamplingParams, count: int = 12, graphs: CaptureSizes = GRAPHS[0], **logits: float) -> list[int]:
    """Return the ids of one request over fixed logits."""
    engine = make_engine(module=Flat(**logits), graphs=graphs)
    request = (prompt(1, 4), count - 1, sampling)
    ids = generate([request], engine=engine)[0]
    captured(engine)
    assert generate([request], engine=engine)[0] == ids, "the first steps ran before the variant was captured"
    return ids


def captured(engine: KVCacheEngine) -> None:
    """Capture the steps that were requested so far."""
    while engine.idle():
        pass


def misses(engine: KVCacheEngine) -> tuple[float, float]:
    """Return the steps of decode and prefill that did not run in one bucket."""
    counters = engine.counters()
    return counters["graph_misses"], counters["prefill_misses"]


@pytest.mark.parametrize("graphs", GRAPHS, ids=NAMES)
def test_a_bias_is_added_before_everything_else(graphs: CaptureSizes) -> None:
    assert set(drawn(SamplingParams(logit_bias={7: 2.0}), graphs=graphs, i5=1.0, i7=0.0)) == {7}
    assert set(drawn(SamplingParams(logit_bias={5: -100.0}), graphs=graphs, i5=1.0, i7=0.0)) == {7}
    # The repetition penalty divides the biased logit: 0 + 2, then 2 / 4 < 1.
    ids = drawn(SamplingParams(logit_bias={7: 2.0}, repetition_penalty=4.0), 3, graphs, i5=1.0, i7=0.0)
    assert ids == [7, 5, 7]


@pytest.mark.parametrize("graphs", GRAPHS, ids=NAMES)
def test_penalties_follow_the_counts_of_generated_ids(graphs: CaptureSizes) -> None:
    """Presence subtracts once; frequency once per occurrence."""
    presence = drawn(SamplingParams(presence_penalty=1.0), 6, graphs, i5=1.5, i7=1.0, i9=0.2)
    assert presence == [5, 7, 5, 5, 5, 5], "5 falls to 0.5 and 7 to 0.0"
    frequency = drawn(SamplingParams(frequency_penalty=0.4), 7, graphs, i5=1.5, i7=1.0)
    assert frequency == [5, 5, 7, 5, 7, 5, 7]
    assert drawn(SamplingParams(frequency_penalty=-2.0), 4, graphs, i5=1.0, i7=0.9) == [5] * 4


def test_ids_of_the_prompt_do_not_count() -> None:
    token = prompt(1, 4)[0]
    logits = {f"i{token}": 1.0, f"i{(token + 1) % VOCAB}": 0.5}
    assert drawn(SamplingParams(presence_penalty=0.1), 2, **logits) == [token] * 2


@pytest.mark.parametrize("graphs", GRAPHS, ids=NAMES)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_results_do_not_depend_on_the_batch(lookahead: int, graphs: CaptureSizes) -> None:
    params = (BIASED, PENALISED, PLAIN, SamplingParams(), replace(PENALISED, logit_bias={3: 1.5}, temperature=0.0))
    requests = [(prompt(seed, 3 + seed), 15, each) for seed, each in enumerate(params)]
    alone = [generate([request])[0] for request in requests]
    engine = make_engine(graphs=graphs, lookahead=lookahead)
    for _ in range(3):
        assert generate(requests, engine=engine, lookahead=lookahead) == alone
        captured(engine)
    assert (
        alone[1] != generate([(prompt(1, 4), 15, replace(PENALISED, presence_penalty=0.0, frequency_penalty=0.0))])[0]
    )


def test_variants_are_captured_on_demand_and_serve_the_whole_batch() -> None:
    engine = make_engine(graphs=GRAPHS[1], prefix_cache=False)
    graphs = engine._runner.graphs
    assert graphs is not None and graphs.decode is not None
    generate([(prompt(1, 4), 5, PLAIN)], engine=engine)
    captured(engine)
    assert not any(kind.adjusts for kind in graphs.passes.kinds)
    assert not graphs.decode.variants[True, False] and misses(engine) == (0, 0)
    batch = [(prompt(seed, 4), 5, each) for seed, each in enumerate((BIASED, PLAIN, PENALISED))]
    for _ in range(3):
        generate(batch, engine=engine)
        captured(engine)
    before = misses(engine)
    assert before > (0, 0) and graphs.decode.variants[True, False].sizes == [(8,)]
    generate(batch, engine=engine)
    assert misses(engine) == before


class Operations(TorchDispatchMode):
    """Records the operations that run, and the sizes of their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_default_decode_step_has_no_operation_of_adjustments() -> None:
    """Neither before a request needs them nor after the variant exists."""
    engine = make_engine(graphs=(8,))
    decode = engine._runner.graphs.decode  # type: ignore[union-attr]
    assert decode is not None
    default = decode.buckets[(8,)]
    recorded = []
    for sampling in (PLAIN, PENALISED):
        generate([(prompt(1, 4), 3, sampling)], engine=engine)
        captured(engine)
        with torch.inference_mode():
            default.park()
            with Operations() as operations:
                default.forward()
        recorded.append(operations.found)
    assert recorded[0] == recorded[1]
    assert not any("scatter_add" in name or "index_add" in name for name in recorded[0])
    variant = decode.variants[True, False][(8,)]
    with Operations() as operations, torch.inference_mode():
        variant.forward()
    names = " ".join(operations.found)
    assert "scatter_add" in names and "index_add" in names


def test_sequences_beside_adjusted_ones_keep_their_bits() -> None:
    """Also the sign of a zero, which decides the order of equal logits in the kernels."""
    from mstar_core.engine.sampling.columns import UploadedColumns
    from mstar_core.engine.sampling.sampler import adjusted

    engine = make_engine()
    subset = engine._runner.sampler.subset
    logits = torch.tensor([[-0.0, 0.0, 1e-30, float("-inf"), -3.0] + [0.5] * (VOCAB - 5)]).repeat(2, 1)
    columns = UploadedColumns.of([PLAIN, PENALISED], torch.device("cpu")).columns
    counts = torch.ones(2, VOCAB, dtype=torch.int32)
    found = adjusted(logits, columns, counts, subset)
    assert found[0].view(torch.int32).tolist() == logits[0].view(torch.int32).tolist()
    assert found[1, 4] == -5.0


def test_preemption_changes_no_adjusted_id() -> None:
    requests = [(prompt(seed, 3 + 5 * seed), 20, replace(PENALISED, seed=seed)) for seed in range(7)]
    engine = make_engine(num_pages=26, prefix_cache=False)
    assert generate(requests, engine=engine) == generate(requests)
    assert engine.memory().preempted > 0


def test_a_slot_starts_without_the_counts_of_its_last_request() -> None:
    engine = make_engine(max_slots=2)
    first = generate([(prompt(1, 4), 10, PENALISED)], engine=engine)
    assert generate([(prompt(1, 4), 10, PENALISED)], engine=engine) == first


def test_counts_are_allocated_for_the_first_request_that_needs_them() -> None:
    engine = make_engine()
    generate([(prompt(1, 4), 5, PLAIN)], engine=engine)
    assert engine._runner._slots._counts is None
    generate([(prompt(1, 4), 5, PENALISED)], engine=engine)
    assert engine._runner._slots._counts is not None


def test_biases_of_a_cut_head_follow_its_columns() -> None:
    """An id that the node cannot draw is biased without effect."""
    drawable = (range(4, 5), range(11, 40, 2))
    module = TinyLM(sharpness=2.0)
    module.out.restrict(drawable)
    engine = make_engine(spec=replace(LM, sampling=Sampling(port="token", vocabulary=drawable)), module=module)
    params = SamplingParams(logit_bias={5: 100.0, 13: 60.0}, frequency_penalty=2.0)
    assert set(generate([(prompt(1, 4), 12, params)], engine=engine)[0]) == {13}


def opened(engine: KVCacheEngine, sampling: SamplingParams) -> None:
    Driver(engine)
    engine.open(Handle(1), sampling, 8)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_bias_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(RequestError, match=f"the id {token}, outside the model's vocabulary of {VOCAB} ids"):
        opened(make_engine(), SamplingParams(logit_bias={token: 1.0}))
