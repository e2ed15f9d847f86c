"""A follower carries out every plan of its leader: plain and captured steps, preemption, checksums, failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from mstar_core.conformance.two_ranks import FollowerThread, ThreadMeeting, led, linked, shards
from mstar_core.engine.base import Handle
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.group.link import GroupEnded
from mstar_core.engine.group.plans import StopPlans
from mstar_core.engine.kv import leader
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.worker.start.build import local_node
from tests.engine.constrained import OBJECT, WORD, answers, constrained_engine, grammars, held
from tests.engine.test_passes_loops import FLOWING, captured, flows
from tests.engine.tiny_engine import LM, Driver, TinyLM, generate, make_engine, prompt

REQUESTS = [
    (prompt(1, 9), 30, SamplingParams()),
    (prompt(2, 41), 25, SamplingParams(temperature=0.8, top_p=0.9, seed=5)),
    (prompt(3, 3), 40, SamplingParams(temperature=1.0, repetition_penalty=1.3, seed=9)),
    (prompt(4, 17), 12, SamplingParams(repetition_penalty=1.2)),
]
ADJUSTED = (prompt(5, 6), 14, SamplingParams(temperature=0.9, frequency_penalty=0.7, logit_bias={3: 2.0}, seed=2))
FEW = {"token_budget": 16}
"""A budget that cuts prompts into chunks beside the decode batch."""


@contextmanager
def pair(**changes: Any) -> Iterator[tuple[KVCacheEngine, FollowerThread]]:
    """Make a leader and a follower of one node."""
    meeting = ThreadMeeting()
    spec = local_node(changes.pop("spec", LM), 2)
    leader, follower = (
        make_engine(spec=spec, module=TinyLM(shard=shard), is_captured=False, **changes) for shard in shards(meeting)
    )
    with led({"LM": leader}, {"LM": follower}, meeting) as thread:
        yield leader, thread


@pytest.mark.parametrize("lookahead", [0, 1])
def test_requests_get_the_ids_of_one_rank(lookahead: int) -> None:
    wanted = generate(REQUESTS, **FEW)
    with pair(lookahead=lookahead, **FEW) as (engine, follower):
        assert generate(REQUESTS, engine=engine, lookahead=lookahead) == wanted
    assert {"Step", "SlotChanges"} <= set(follower.kinds)


def test_preempted_requests_are_recomputed_on_every_rank() -> None:
    wanted = generate(REQUESTS, **FEW)
    with pair(num_pages=26, **FEW) as (engine, follower):
        assert generate(REQUESTS, engine=engine) == wanted
        assert engine.memory().preempted > 0
    assert "PagesCleared" in follower.kinds


def test_cached_prefixes_give_the_ids_of_one_rank_without_any() -> None:
    """The ranks share one decision about a hit: the follower gets the pages with the plan."""
    shared = prompt(1, 21)
    asked = [([*shared, *prompt(10 + number, 5)], 8, SamplingParams()) for number in range(3)]
    wanted = [generate([each], prefix_cache=False)[0] for each in asked]
    with pair() as (engine, _):
        driver, found = Driver(engine), []
        for handle, (ids, steps, sampling) in enumerate(asked):
            driver.open(handle, sampling)
            first, loop = driver.prefill(handle, ids, tokens_hash_seed=b"ids"), driver.decode(handle, steps)
            driver.run()
            assert driver.done[first].cached_tokens == (20 if handle else 0)
            found.append([int(driver.done[first].outputs["token"]), *driver.ids[loop]])
            engine.close(Handle(handle))
    assert found == wanted


def test_captured_steps_are_replayed_by_their_host_values() -> None:
    sizes = CaptureSizes(decode=(2, 4), prefill=(16,))
    changes: dict[str, Any] = {"graphs": sizes, **FEW}
    wanted = generate(REQUESTS, **FEW)
    with pair(**changes) as (engine, follower):
        engine.capture()
        assert generate(REQUESTS, engine=engine) == wanted
    counts, theirs = engine.counters(), follower.engines["LM"].counters()
    assert counts["graph_hits"] > 0 and counts["prefill_hits"] > 0
    assert follower.kinds.count("Capture") == 3
    for name in ("graph_hits", "graph_misses", "prefill_hits", "prefill_misses"):
        assert theirs[name] == counts[name], name


def test_several_steps_of_one_plan_give_the_ids_of_one_rank() -> None:
    """The requests end at different tokens of a plan, and every rank stops them there."""
    wanted, ticks = generate(REQUESTS, **FEW), count()
    changes: dict[str, Any] = {"graphs": CaptureSizes(decode=(2, 4), prefill=(16,)), **FEW}
    with pair(lookahead=1, steps_at_once=8, clock=lambda: next(ticks) * 1e-6, **changes) as (engine, follower):
        engine.capture()
        assert generate(REQUESTS, engine=engine, lookahead=1) == wanted
        launches = engine.counters()["graph_hits"], follower.kinds.count("Step")
    assert launches[0] > 2 * launches[1]
    assert follower.engines["LM"].counters()["graph_hits"] == launches[0]


def test_adjusted_logits_give_the_ids_of_one_rank_before_and_after_the_capture_of_their_variant() -> None:
    requests = [*REQUESTS[:2], ADJUSTED]
    wanted = generate(requests, **FEW)
    with pair(graphs=CaptureSizes(decode=(4,), prefill=(16,)), prefix_cache=False, **FEW) as (engine, follower):
        engine.capture()
        for _ in range(3):
            assert generate(requests, engine=engine) == wanted
            while engine.idle():
                pass
        misses = engine.counters()["graph_misses"]
        assert generate(requests, engine=engine) == wanted and engine.counters()["graph_misses"] == misses
    assert follower.kinds.count("Capture") == 4


@pytest.mark.parametrize("lookahead", [0, 1])
def test_constrained_requests_get_the_ids_of_one_rank_before_and_after_the_capture_of_their_variant(
    lookahead: int,
) -> None:
    """Followers have no grammar: the masks come with the plans. Two decode batches alternate, and each is sent once."""
    requests = [*((ids, 20, sampling) for ids, _, sampling in REQUESTS[:2]), (prompt(6, 5), 20, held(WORD, 3))]
    requests.append((prompt(7, 9), 20, held(OBJECT, 4, frequency_penalty=0.5)))
    wanted = answers(requests, constrained_engine(**FEW))
    changes: dict[str, Any] = {"graphs": CaptureSizes(decode=(4,), prefill=(16,)), "prefix_cache": False, **FEW}
    with pair(lookahead=lookahead, grammars=grammars(), max_slots=32, **changes) as (engine, follower):
        engine.capture()
        for _ in range(3):
            assert answers(requests, engine, lookahead) == wanted
            while engine.idle():
                pass
        misses = engine.counters()["graph_misses"]
        assert answers(requests, engine, lookahead) == wanted and engine.counters()["graph_misses"] == misses
    assert follower.engines["LM"].counters()["graph_hits"] == engine.counters()["graph_hits"] > 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_known_ids_are_taken_on_every_rank(lookahead: int) -> None:
    """Seen ids and counts of a follower show in its draws, and its last ids in the checksums."""
    requests = [REQUESTS[2], ADJUSTED]
    wanted = generate(requests, **FEW)
    with pair(lookahead=lookahead, **FEW) as (engine, follower):
        driver = Driver(engine, lookahead)
        loops = []
        for handle, ((ids, steps, sampling), drawn) in enumerate(zip(requests, wanted, strict=True)):
            driver.open(handle, sampling)
            driver.prefill(handle, ids, known=drawn[0])
            loops.append(driver.decode(handle, steps, known=tuple(drawn[1:10])))
        driver.run()
    assert [driver.ids[loop] for loop in loops] == [drawn[1:] for drawn in wanted]
    mine, theirs = (each._runner._slots for each in (engine, follower.engines["LM"]))
    assert torch.equal(mine.counts(), theirs.counts()) and torch.equal(mine.seen, theirs.seen)


def test_loop_passes_are_replayed_with_their_device_inputs() -> None:
    wanted = flows(make_engine(spec=FLOWING, vocab=0), [0, 1, 2])
    with pair(spec=replace(FLOWING, name="LM"), vocab=0, graphs=(1,)) as (engine, follower):
        flows(engine, [0, 1, 2])
        captured(engine)
        found = flows(engine, [0, 1, 2])
    assert follower.engines["LM"].counters()["graph_hits"] == engine.counters()["graph_hits"] > 0
    for handle, value in wanted.items():
        torch.testing.assert_close(found[handle], value, atol=1e-5, rtol=0)


def test_other_ids_on_a_follower_end_the_group_with_this_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "COMPARE_EVERY", 4)
    with pytest.raises(GroupEnded, match="drew other ids than the leader"), pair() as (engine, follower):
        follower.is_skewed = True
        generate([(prompt(1, 9), 60, SamplingParams())], engine=engine)


def test_a_lost_follower_ends_the_leader(tmp_path: Any) -> None:
    with linked(tmp_path) as (sender, receiver):
        receiver.close()
        with pytest.raises(GroupEnded, match="rank 1 is lost"):
            for _ in range(3):
                sender.publish(StopPlans())


def test_a_lost_leader_ends_the_follower(tmp_path: Any) -> None:
    with linked(tmp_path) as (sender, receiver):
        sender.publish(StopPlans(reason="first"))
        sender.close()
        frame = receiver.receive(1.0)
        assert frame is not None and frame.plans == [StopPlans(reason="first")]
        with pytest.raises(GroupEnded, match="the leader closed its connection"):
            receiver.receive(1.0)


def test_a_plan_that_did_not_come_ends_the_follower(tmp_path: Any) -> None:
    with linked(tmp_path) as (sender, receiver):
        sender.sequence += 1
        sender.publish(StopPlans())
        with pytest.raises(GroupEnded, match="frame 2 follows frame 0"):
            receiver.receive(1.0)


def test_an_error_after_the_plan_ends_the_group() -> None:
    with pytest.raises(GroupEnded, match="node LM: ValueError: broken"), pair() as (engine, _):
        engine._runner.sampler.subset.suppress = broken  # type: ignore[method-assign]
        driver = Driver(engine)
        driver.open(1)
        driver.prefill(1, prompt(1, 5))
        driver.run()


def broken(logits: torch.Tensor) -> torch.Tensor:
    raise ValueError("broken")
