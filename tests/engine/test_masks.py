"""Constrained sequences obey their grammars at every step, alone and beside plain ones, which keep their bits."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from mstar_core.constraints.matcher import SMALL_VOCABULARY, Grammars, mask_words
from mstar_core.engine.base import Handle, LoopSpec
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.sampling.masks import masked_plainly
from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import Sampling
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.constrained import (
    EITHER,
    END,
    GRAMMARS,
    LONG,
    OBJECT,
    TABLE,
    WORD,
    answers,
    constrained_engine,
    free,
    held,
    obeys,
    text_of,
)
from tests.engine.test_kv_moves import bring, export
from tests.engine.test_sampler_adjustments import Operations, captured, misses
from tests.engine.tiny_engine import LM, VOCAB, Driver, TinyLM, make_engine, prompt

GRAPHS = [CaptureSizes(), CaptureSizes(decode=(1, 8), prefill=(16, 64))]
NAMES = ["plain", "fixed shapes"]
STEPS = 30
PLAIN = [
    (prompt(seed, 3 + seed), STEPS, SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=seed))
    for seed in range(3)
]
HELD = [(prompt(seed, 4), STEPS, held(constraint, seed)) for seed, constraint in enumerate(GRAMMARS * 2)]


def check(requests: list[tuple[list[int], int, SamplingParams]], found: list[tuple[list[int], str]]) -> None:
    for (_, _, sampling), (ids, reason) in zip(requests, found, strict=True):
        if sampling.constraint is not None:
            assert obeys(sampling.constraint, ids, is_whole=reason == "stop"), text_of(ids)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", GRAPHS, ids=NAMES)
def test_every_answer_obeys_its_grammar(graphs: CaptureSizes, lookahead: int) -> None:
    engine = constrained_engine(graphs=graphs, lookahead=lookahead)
    greedy = [(ids, steps, replace(sampling, temperature=0.0)) for ids, steps, sampling in HELD[:3]]
    alone = [answers([request], constrained_engine())[0] for request in HELD + greedy]
    for _ in range(2):
        found = answers(HELD + greedy, engine, lookahead)
        check(HELD + greedy, found)
        assert found == alone, "an answer does not depend on its batch"
        captured(engine)
    words = {text_of(ids) for ids, _ in found}
    assert words & {"true", "false"} and all(json.loads(text) for text in words if text.startswith("{"))
    without = answers([(ids, steps, free(sampling)) for ids, steps, sampling in HELD], engine, lookahead)
    assert not any(
        obeys(request[2].constraint or "", ids, is_whole=True) for request, (ids, _) in zip(HELD, without, strict=True)
    )


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", GRAPHS, ids=NAMES)
def test_plain_sequences_draw_as_in_a_batch_without_grammars(graphs: CaptureSizes, lookahead: int) -> None:
    mixed = [request for pair in zip(PLAIN, HELD, strict=False) for request in pair]
    plain = [(ids, steps, free(sampling)) for ids, steps, sampling in mixed]
    wanted = answers(plain, make_engine(graphs=graphs, lookahead=lookahead), lookahead)
    engine = constrained_engine(graphs=graphs, lookahead=lookahead)
    for _ in range(3):
        found = answers(mixed, engine, lookahead)
        check(mixed, found)
        assert found[::2] == wanted[::2]
        captured(engine)
    assert found[1::2] != wanted[1::2]


def test_plain_sequences_keep_their_lookahead_and_constrained_ones_wait_for_their_ids() -> None:
    driver = Driver(constrained_engine(lookahead=1), 1)
    for handle, sampling in enumerate((SamplingParams(), held(WORD))):
        driver.open(handle, sampling)
        driver.prefill(handle, prompt(handle, 4))
    driver.run()
    loops = [driver.decode(0, 20), driver.decode(1, 6)]
    begun = len(driver.results)
    driver.run()
    steps = [set(result.loop.keys.tolist()) for result in driver.results[begun:] if result.loop is not None]
    assert [loops[0] in keys for keys in steps] == [True] * 20
    assert [loops[1] in keys for keys in steps[:8]] == [True, False] * 4


def test_constrained_sequences_alone_run_in_every_step() -> None:
    driver = Driver(constrained_engine(lookahead=1), 1)
    for handle in range(2):
        driver.open(handle, held(WORD, handle))
        driver.prefill(handle, prompt(handle, 4))
        driver.decode(handle, 3)
    driver.run()
    steps = [len(result.loop.keys) for result in driver.results if result.loop is not None]
    assert steps == [2] * 3


def test_constrained_sequences_that_begin_apart_soon_share_their_steps() -> None:
    driver = Driver(constrained_engine(lookahead=1), 1)
    for handle in range(3):
        driver.open(handle, held(WORD, handle))
        driver.prefill(handle, prompt(handle, 4))
    driver.run()
    loops = [driver.decode(0, 12)]
    driver.turn()
    loops += [driver.decode(handle, 8) for handle in (1, 2)]
    driver.run()
    steps = [set(result.loop.keys.tolist()) for result in driver.results if result.loop is not None]
    assert set(loops) in steps[:3], steps
    assert len(steps) <= 13, "one step for each id of the longest, and not one for each group that began together"


def test_an_answer_that_may_not_go_on_ends_by_an_end_id() -> None:
    for seed in range(4):
        ((ids, reason),) = answers([(prompt(seed, 3), STEPS, held(EITHER, seed))], constrained_engine())
        assert reason == "stop" and ids[-1] == END and text_of(ids) in ("true", "false")
    ((ids, reason),) = answers([(prompt(1, 3), 2, held(OBJECT))], constrained_engine())
    assert (reason, len(ids)) == ("length", 3) and obeys(OBJECT, ids, is_whole=False)


def test_a_loop_without_stop_ids_goes_on_with_end_ids() -> None:
    driver = Driver(constrained_engine())
    driver.open(0, held(EITHER, logit_bias={TABLE.tokens.index(b"true"): 100.0}))
    first, loop = driver.prefill(0, prompt(1, 3)), driver.decode(0, 5)
    driver.run()
    assert int(driver.done[first].outputs["token"]) == TABLE.tokens.index(b"true")
    assert driver.ids[loop] == [END] * 5


def test_masks_come_before_biases_and_penalties() -> None:
    """A bias cannot bring a forbidden id back, and chooses among those that are allowed."""
    e, t = TABLE.tokens.index(b"e"), TABLE.tokens.index(b"t")
    sampling = held(EITHER, temperature=0.0, logit_bias={END: 100.0, e: 100.0, t: 90.0}, presence_penalty=1.0)
    ((ids, _),) = answers([(prompt(1, 3), STEPS, sampling)], constrained_engine())
    assert ids[0] == t and text_of(ids) == "true"


def test_log_probabilities_stay_those_of_the_model() -> None:
    driver = Driver(constrained_engine())
    driver.open(0, held(EITHER, logprobs=0))
    key, loop = driver.prefill(0, prompt(1, 9)), driver.decode(0, 8, (END,))
    driver.run()
    ids = [int(driver.done[key].outputs["token"]), *driver.ids[loop]]
    own = [float(row[0]) for result in driver.results for row in result.scores.values()]
    model = Driver(make_engine())
    model.open(0)
    job = model.prefill(0, [*prompt(1, 9), *ids[:-1]], outputs=("logits",), sample=False)
    model.run()
    logprobs = torch.log_softmax(model.done[job].outputs["logits"][8:].float(), dim=-1)
    assert np.allclose(own, logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0], atol=1e-5)


# -- errors ----------------------------------------------------------------------------------------------------------


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone() -> None:
    engine = constrained_engine()
    driver = Driver(engine)
    bad = "start: missing"
    with pytest.raises(Exception, match="cannot be compiled"):
        engine._grammars.compile(bad).matcher()  # type: ignore[union-attr]
    for handle, constraint in enumerate((bad, EITHER)):
        driver.open(handle, held(constraint))
        while engine.is_compiling:
            engine._scheduler._requests.requests[Handle(handle)].grammar._compiled.machine.exception()  # type: ignore[union-attr]
        driver.prefill(handle, prompt(handle, 3))
        driver.decode(handle, STEPS, (END,))
    driver.run()
    (failed,) = driver.failed.values()
    assert failed.job.handle == 0 and "missing" in (failed.error.detail or "") and failed.error.status == 400
    assert driver.done and all(done.job.handle == 1 for done in driver.done.values())


def test_an_idle_engine_without_requests_prepares_a_large_vocabulary() -> None:
    grammars = Grammars(lambda: TABLE, SMALL_VOCABULARY + 1)
    driver = Driver(make_engine(grammars=grammars))
    driver.open(0)
    driver.engine.idle()
    assert not grammars.is_prepared, "a request would wait for it"
    driver.engine.close(Handle(0))
    driver.engine.idle()
    assert grammars.is_prepared and len(TABLE) < SMALL_VOCABULARY


def test_a_start_on_a_gpu_prepares_a_large_vocabulary_before_ready() -> None:
    grammars = Grammars(lambda: TABLE, SMALL_VOCABULARY + 1)
    engine = make_engine(grammars=grammars)
    engine.capture_usual()
    assert grammars.is_prepared, "a first request would wait for an idle worker that does it"


def test_the_first_grammar_of_a_large_vocabulary_meets_a_captured_step() -> None:
    grammars = Grammars(lambda: TABLE, SMALL_VOCABULARY + 1)
    engine = make_engine(grammars=grammars, graphs=(2, 8))
    while engine.idle():
        pass
    assert engine._runner.graphs.decode.variants[False, True].sizes == [(8,)]  # type: ignore[union-attr]


@pytest.mark.parametrize("graphs", GRAPHS, ids=NAMES)
def test_masks_are_computed_while_the_layers_of_their_step_run(graphs: CaptureSizes) -> None:
    order: list[str] = []

    class Recorded(Grammars):
        def masks(self, matchers):  # type: ignore[no-untyped-def]
            order.append("masks")
            return super().masks(matchers)

    class Noted(TinyLM):
        def head(self, hidden: torch.Tensor) -> torch.Tensor:
            order.append("layers")
            return super().head(hidden)

    grammars = Recorded(lambda: TABLE, VOCAB)
    grammars.compile(WORD).matcher()
    engine = make_engine(grammars=grammars, module=Noted(), graphs=graphs, lookahead=1)
    for _ in range(2):
        driver = Driver(engine, 1)
        driver.open(0, held(WORD))
        driver.prefill(0, prompt(1, 4))
        driver.run()
        order.clear()
        driver.decode(0, 4)
        driver.run()
        assert order == ["layers", "masks"] * 4
        engine.close(Handle(0))
        captured(engine)


def test_jobs_wait_for_their_grammar_while_others_run() -> None:
    from concurrent.futures import Future

    from mstar_core.constraints.matcher import Compiled, Grammar

    engine = constrained_engine()
    driver = Driver(engine)
    driver.open(0, held(EITHER))
    driver.open(1)
    slow: Future[object] = Future()
    engine._scheduler._requests.requests[Handle(0)].grammar = Grammar(Compiled(slow))  # type: ignore[arg-type]
    jobs = [driver.prefill(handle, prompt(handle, 3)) for handle in range(2)]
    driver.run()
    assert set(driver.done) == {jobs[1]} and engine.is_compiling
    assert engine.pages_and_waits()[Handle(0)] == (0, "waits for its grammar")
    assert engine.pressure().ready == 0 and not engine.contention().waiting
    slow.set_result(engine._grammars.compile(EITHER)._compiled.machine.result())  # type: ignore[union-attr]
    driver.run()
    assert set(driver.done) == set(jobs) and not engine.is_compiling


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_matcher_that_fails_ends_its_request_alone(lookahead: int) -> None:
    """Known ids that the grammar forbids stand for every id that a matcher refuses."""
    others = [(0, held(WORD)), (2, SamplingParams())]
    wanted = answers([(prompt(handle, 3), 8, sampling) for handle, sampling in others], constrained_engine())
    for known in ({"known": END}, {}):
        driver = Driver(constrained_engine(lookahead=lookahead), lookahead)
        loops = {}
        for handle, sampling in [*others, (1, held(OBJECT))]:
            driver.open(handle, sampling)
            driver.prefill(handle, prompt(handle, 3), **(known if handle == 1 else {}))
            stays = {} if handle != 1 or known else {"known": (END,)}
            loops[handle] = driver.decode(handle, 8, (END,), **stays)  # type: ignore[arg-type]
        driver.run()
        (failed,) = driver.failed.values()
        assert failed.job.handle == 1 and isinstance(failed.error, EngineError)
        assert "left the grammar" in failed.error.title and "satisfy" in (failed.error.detail or "")
        for (handle, _), (ids, _) in zip(others, wanted, strict=True):
            assert driver.ids[loops[handle]] == ids[1:]


def test_a_node_without_a_vocabulary_refuses_grammars() -> None:
    with pytest.raises(EngineError, match="cannot hold its ids to a grammar"):
        make_engine().open(Handle(0), held(EITHER), 8)


# -- state that moves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1])
def test_preemption_changes_no_answer(lookahead: int) -> None:
    requests = [(prompt(seed, 3 + 5 * seed), 20, held((OBJECT, WORD)[seed % 2], seed)) for seed in range(7)]
    engine = constrained_engine(num_pages=26, prefix_cache=False, lookahead=lookahead)
    wanted = [answers([request], constrained_engine())[0] for request in requests]
    assert answers(requests, engine, lookahead) == wanted
    check(requests, wanted)
    assert engine.memory().preempted > 0


def test_a_cached_prefix_changes_no_answer() -> None:
    engine, found = constrained_engine(), []
    for handle in range(2):
        driver = Driver(engine)
        driver.open(handle, held(OBJECT))
        first, loop = driver.prefill(handle, prompt(1, 21), tokens_hash_seed=b"ids"), driver.decode(handle, 12, (END,))
        driver.run()
        assert bool(driver.done[first].cached_tokens) == bool(handle)
        found.append(driver.ids[loop])
    assert found[0] == found[1]


@pytest.mark.parametrize("after", [0, 4])
def test_an_answer_goes_on_after_its_cache_has_moved(after: int) -> None:
    sampling, ids = held(OBJECT, 3), prompt(3, 9)
    ((wanted, _),) = answers([(ids, STEPS, sampling)], constrained_engine())
    source, target = Driver(constrained_engine()), Driver(constrained_engine())
    for driver in (source, target):
        driver.open(1, sampling)
    first = source.prefill(1, ids)
    begun = source.decode(1, after, (END,)) if after else None
    source.run()
    bring(target, 1, export(source, 1))
    loop = target.decode(1, STEPS, (END,))
    target.run()
    before = [] if begun is None else source.ids[begun]
    assert [int(source.done[first].outputs["token"]), *before, *target.ids[loop]] == wanted


def resumed(known: list[int], sampling: SamplingParams, lookahead: int) -> list[int]:
    driver = Driver(constrained_engine(lookahead=lookahead), lookahead)
    driver.open(0, sampling)
    first, loop = driver.prefill(0, prompt(3, 9), known=known[0]), driver.decode(0, STEPS, (END,), tuple(known[1:]))
    driver.run()
    assert not driver.failed, driver.failed
    return [int(driver.done[first].outputs["token"]), *driver.ids[loop]]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_resumed_answer_goes_on_as_if_its_known_ids_had_been_drawn(logprobs: int | None, lookahead: int) -> None:
    sampling = held(OBJECT, 5, logprobs=logprobs)
    ((wanted, _),) = answers([(prompt(3, 9), STEPS, sampling)], constrained_engine())
    for cut in (1, 2, 5, len(wanted)):
        assert resumed(wanted[:cut], sampling, lookahead) == wanted
    other = [TABLE.tokens.index(word) for word in (b"{", b'"', b"a")]
    assert wanted[:3] != other
    ids = resumed(other, sampling, lookahead)
    assert ids[:3] == other and obeys(OBJECT, ids, is_whole=ids[-1] == END), "the known ids decide, not a draw"


@pytest.mark.parametrize("lookahead", [0, 1])
def test_each_candidate_has_a_state_of_its_own(lookahead: int) -> None:
    """Candidates run a loop pass by pass, whose next mask needs the id of the pass before."""
    assert LM.kv is not None
    spec = replace(LM, kv=replace(LM.kv, rows=3))
    engine = constrained_engine(spec=spec, max_slots=20, lookahead=lookahead)
    driver = Driver(engine, lookahead)
    driver.open(0, held(LONG, 3, temperature=1.5))
    first = driver.prefill(0, prompt(2, 6))
    loop = LoopSpec(max_iters=3, carry={"token": "token"}, emit=("token",), fused=True)
    key = driver.submit(0, loop=loop, outputs=("token",), rows=3)
    driver.run()
    assert not driver.failed, driver.failed
    drawn = torch.stack([item.outputs["token"].reshape(-1) for item in driver.emissions[key]]).T.tolist()
    begun = int(driver.done[first].outputs["token"])
    assert len({tuple(each) for each in drawn}) > 1
    assert all(obeys(LONG, [begun, *each], is_whole=False) for each in drawn)


# -- the arithmetic --------------------------------------------------------------------------------------------------


def packed(allowed: torch.Tensor) -> torch.Tensor:
    """Return masks of allowed ids. allowed: bool [n, vocabulary]."""
    bits = np.zeros((len(allowed), mask_words(allowed.shape[1]) * 32), dtype=np.uint8)
    bits[:, : allowed.shape[1]] = allowed.numpy()
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32).copy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forbidden_ids_alone_change(dtype: torch.dtype) -> None:
    subset = constrained_engine()._runner.sampler.subset
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, VOCAB, generator=generator).to(dtype)
    logits[:, 3] = -0.0
    allowed = torch.rand(2, VOCAB, generator=generator) < 0.5
    rows = torch.tensor([-1, 1, -1, 0], dtype=torch.int32)
    found = masked_plainly(logits.clone(), packed(allowed), rows, subset)
    keeps = torch.stack(
        [torch.ones(VOCAB, dtype=torch.bool), allowed[1], torch.ones(VOCAB, dtype=torch.bool), allowed[0]]
    )
    assert torch.equal(found.isneginf(), ~keeps)
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(found.view(bits)[keeps], logits.view(bits)[keeps])


def test_masks_of_a_cut_head_follow_its_columns() -> None:
    t = TABLE.tokens.index(b"true")
    drawable = (range(6, 10), range(t, t + 1), range(END, END + 1))
    module = TinyLM(sharpness=2.0)
    module.out.restrict(drawable)
    spec = replace(LM, sampling=Sampling(port="token", vocabulary=drawable))
    found = answers([(prompt(1, 4), 6, held(EITHER))], constrained_engine(spec=spec, module=module))
    assert found == [([t, END], "stop")]


# -- captured steps --------------------------------------------------------------------------------------------------


def test_variants_are_captured_on_demand_and_serve_the_whole_batch() -> None:
    engine = constrained_engine(graphs=GRAPHS[1], prefix_cache=False)
    graphs = engine._runner.graphs
    assert graphs is not None and graphs.decode is not None
    answers(PLAIN, engine)
    captured(engine)
    assert misses(engine) == (0, 0) and not any(kind.masks for kind in graphs.passes.kinds)
    variants = {variant for variant, buckets in graphs.decode.variants.items() if buckets}
    assert variants == {(False, False)}
    adjusted = held(WORD, 3, frequency_penalty=0.5)
    batch = [*PLAIN, *HELD[:2], (prompt(9, 4), STEPS, adjusted)]
    for _ in range(3):
        wanted = answers(batch, engine)
        captured(engine)
    before = misses(engine)
    assert before > (0, 0) and graphs.decode.variants[True, True].sizes and graphs.decode.variants[False, True].sizes
    assert answers(batch, engine) == wanted
    assert misses(engine) == before


def test_a_batch_beyond_the_largest_bucket_is_divided_with_its_masks() -> None:
    requests = [*HELD, *PLAIN]
    wanted = [answers([request], constrained_engine())[0] for request in requests]
    engine = constrained_engine(graphs=CaptureSizes(decode=(2, 4)), prefix_cache=False)
    for _ in range(2):
        assert answers(requests, engine) == wanted
        captured(engine)


def test_the_default_decode_step_has_no_operation_of_masks() -> None:
    engine = constrained_engine(graphs=(8,))
    decode = engine._runner.graphs.decode  # type: ignore[union-attr]
    assert decode is not None
    recorded = []
    for request in (PLAIN[0], HELD[0]):
        answers([request], engine)
        captured(engine)
        with torch.inference_mode():
            decode.buckets[(8,)].park()
            with Operations() as operations:
                decode.buckets[(8,)].forward()
        recorded.append(operations.found)
    assert recorded[0] == recorded[1] and not any("shift" in name for name in recorded[0])
    masking = decode.variants[False, True][(8,)]
    assert masking.masked is not None
    for part, has_masks in (
        (masking, False),
        (masking.masked, True),
    ):  # the host computes masks while the first part runs
        with Operations() as operations, torch.inference_mode():
            part.forward()
        assert any("shift" in name for name in operations.found) == has_masks
