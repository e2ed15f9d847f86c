"""Several decode steps in one launch give the ids of single steps, whatever arrives, ends or is cancelled meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mstar_core.engine.attention.flashinfer import FlashInferDecode
from mstar_core.engine.base import Handle, LoopSpec
from mstar_core.engine.slack import Slack
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.fake_device import PAGE, FakeNode, alone
from tests.engine.test_decode_graphs import SAMPLINGS
from tests.engine.tiny_engine import Driver, make_engine, prompt

STEP_S = 1e-4


def fake_node(**changes: object) -> FakeNode:
    """A node whose captured steps are short enough for several at once."""
    settings: dict[str, object] = {"lookahead": 1, "steps_at_once": 8, "step_s": STEP_S}
    return FakeNode(**(settings | changes))  # type: ignore[arg-type]


def steps_of(node: FakeNode) -> list[int]:
    """Decode steps of each launch so far."""
    return [plan.decode.steps for plan in node.device.plans if plan.decode is not None]


def test_a_launch_holds_as_many_steps_as_the_settings_allow() -> None:
    node = fake_node(steps_at_once=5)
    node.open(0)
    node.prefill(0, [4, 5])
    loop = node.decode(0, 23)
    node.run()
    assert steps_of(node) == [5, 5, 5, 5, 3]
    assert [alone([4, 5], 23)[1:]] == [node.ids[loop]]


@pytest.mark.parametrize(
    "changes",
    [{"steps_at_once": 1}, {"step_s": 0.01}, {"step_s": 0.0}],
    ids=["setting", "long steps", "not captured"],
)
def test_steps_are_single_where_several_are_not_allowed(changes: dict[str, object]) -> None:
    node = fake_node(**changes)
    node.open(0)
    node.prefill(0, [4, 5])
    loop = node.decode(0, 20)
    node.run()
    assert set(steps_of(node)) == {1} and node.ids[loop] == alone([4, 5], 20)[1:]


def test_steps_are_single_while_a_first_sound_is_awaited() -> None:
    node, is_due = fake_node(), True
    node.scheduler.yield_to(Slack(is_first_due=lambda: is_due))
    node.open(0, 60)
    node.prefill(0, [4, 5])
    node.decode(0, 40)
    for _ in range(8):
        node.launch()
        node.collect()
    assert set(steps_of(node)) == {1}
    is_due = False
    node.run()
    assert max(steps_of(node)) == 8


@pytest.mark.parametrize(("is_read", "most"), [(True, 2), (False, 6)])
def test_the_steps_of_a_launch_take_no_longer_than_their_limit(is_read: bool, most: int) -> None:
    """Ids that nothing takes as they come may come later."""
    node = fake_node(step_s=0.95e-3)
    node.open(0)
    node.prefill(0, [4, 5])
    loop = LoopSpec(max_iters=20, carry={"token": "token"}, stop_port="token", is_read=is_read)
    node.submit(0, loop=loop, outputs=("token",))
    node.run()
    assert max(steps_of(node)) == most


def test_a_stop_within_a_launch_ends_the_loop_there() -> None:
    ids = alone([7, 8, 9], 30)
    stop = ids[11]
    end = ids.index(stop, 1)
    node = fake_node()
    node.open(0)
    node.prefill(0, [7, 8, 9])
    first = node.decode(0, 30, stop=(stop,))
    again = node.decode(0, 6)
    node.run()
    assert node.ids[first] == ids[1 : end + 1] and node.done[first].reason == "stop"
    assert node.done[first].iterations == end
    plain = FakeNode()
    plain.open(0)
    plain.prefill(0, [7, 8, 9])
    plain.decode(0, 30, stop=(stop,))
    behind = plain.decode(0, 6)
    plain.run()
    assert node.ids[again] == plain.ids[behind], "the loop behind it reads the same cache, positions and draws"


@dataclass
class Script:
    """Random requests. arrives: turn; cancelled: turn after the arrival, None: never."""

    seed: int
    requests: list[tuple[int, list[int], int, tuple[int, ...], int | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        for _ in range(chance.randint(3, 9)):
            ids = [chance.randrange(100) for _ in range(chance.randint(1, 14))]
            stops = tuple(chance.randrange(101) for _ in range(chance.choice((0, 0, 2, 6))))
            cancelled = chance.randint(1, 12) if chance.random() < 0.25 else None
            self.requests.append((chance.randint(0, 30), ids, chance.randint(1, 26), stops, cancelled))

    def played(self, node: FakeNode) -> list[tuple[list[int], str]]:
        """Run the script. Returns ids and reason of each request's two loops, without those of cancelled requests."""
        keys: dict[int, list[int]] = {}
        handles = count()
        for turn in range(2000):
            for arrives, ids, steps, stops, _ in self.requests:
                if arrives == turn:
                    handle = next(handles)
                    node.open(handle, len(ids) + 2 * steps + 1)
                    node.prefill(handle, ids, tokens_hash_seed=b"")
                    keys[handle] = [node.decode(handle, steps, stop=stops), node.decode(handle, steps, stop=stops[:1])]
            ordered = sorted(self.requests, key=lambda each: each[0])
            for handle, (arrives, _, _, _, cancelled) in enumerate(ordered):
                if cancelled is not None and arrives + cancelled == turn:
                    node.scheduler.close(Handle(handle))
            if node.scheduler.pressure().ready:
                node.launch()
                if len(node.running) > node.lookahead:
                    node.collect()
            elif node.running:
                node.collect()
            elif turn > 60:
                break
        assert not node.running and not node.failed, node.failed
        ordered = sorted(self.requests, key=lambda each: each[0])
        kept = [handle for handle, each in enumerate(ordered) if each[4] is None]
        found = [(node.ids.get(key, []), node.done[key].reason) for handle in kept for key in keys[handle]]
        for handle in kept:
            node.scheduler.close(Handle(handle))
        assert node.memory.use().pages_used == 0 and node.memory.use().slots_used == 0
        return found


@pytest.mark.parametrize("pages", [64, 20])
@pytest.mark.parametrize("seed", range(10))
def test_arrivals_cancels_stops_and_preemptions_change_no_id(seed: int, pages: int) -> None:
    """With few pages, requests are preempted while launches of several steps are in flight."""
    several = fake_node(pages=pages, most_tokens=PAGE * 18)
    expected = Script(seed).played(FakeNode(pages=200, most_tokens=PAGE * 18, prefix_cache=False))
    assert Script(seed).played(several) == expected
    assert max(steps_of(several)) == 8


class Ticks:
    """A clock that moves a little at each look, so that every step is short."""

    def __init__(self) -> None:
        self._now = count()

    def __call__(self) -> float:
        return next(self._now) * 1e-6


def driver_of(steps_at_once: int, graphs: tuple[int, ...], sampling: SamplingParams = SAMPLINGS[0]) -> Driver:
    """An engine whose steps for this sampling have been captured and measured."""
    engine = make_engine(graphs=graphs, lookahead=1, steps_at_once=steps_at_once, clock=Ticks(), max_seq_len=192)
    driver = Driver(engine, lookahead=1)
    for _ in range(2):
        handles = range(90, 90 + max(graphs, default=1))
        for handle in handles:
            driver.open(handle, sampling)
            driver.prefill(handle, prompt(1, 4))
            driver.decode(handle, 20)
        driver.run()
        for handle in handles:
            engine.close(Handle(handle))
        while engine.idle():
            pass
    driver.results.clear()
    return driver


def engine_ids(steps_at_once: int, graphs: tuple[int, ...]) -> tuple[list[list[int]], list[int]]:
    """Ids of requests of every sampling that join one after the other, each with two loops; launches' tokens."""
    driver, keys = driver_of(steps_at_once, graphs), list[int]()
    for handle, sampling in enumerate(SAMPLINGS):
        driver.open(handle, sampling, 96)
        driver.prefill(handle, prompt(handle, 3 + 2 * handle))
        keys += [driver.decode(handle, 11 + 3 * handle, stop=(5, 17)), driver.decode(handle, 9, stop=(30,))]
        for _ in range(3):
            driver.turn()
    driver.run()
    assert not driver.failed
    tokens = [result.tokens for result in driver.results]
    return [driver.ids.get(key, []) for key in keys], tokens


@pytest.mark.parametrize("graphs", [(1, 8), (2,)], ids=["one replay", "several replays"])
def test_draws_and_penalties_of_a_model_are_those_of_single_steps(graphs: tuple[int, ...]) -> None:
    expected, single = engine_ids(1, ())
    found, several = engine_ids(8, graphs)
    assert found == expected
    assert len(several) < len(single) / 2, "most steps share a launch"


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0.9, repetition_penalty=1.8), SamplingParams(temperature=0.9, frequency_penalty=1.5)],
    ids=["seen ids", "counted ids"],
)
def test_a_loop_that_ends_by_length_within_a_launch_marks_no_id_behind_it(sampling: SamplingParams) -> None:
    """Penalties of the loop that follows count the ids that the first one has given, and no more."""
    found, counts = list[list[list[int]]](), list[int]()
    for steps in (1, 8):
        driver = driver_of(steps, (4,), replace(sampling, seed=7))
        for handle, most in enumerate((90, 90, 150)):
            driver.open(handle, replace(sampling, seed=handle), most)
            driver.prefill(handle, prompt(handle, 4))
        long = driver.decode(2, 120)
        keys = [[driver.decode(handle, 13 + handle), driver.decode(handle, 30)] for handle in range(2)]
        driver.run()
        found.append([driver.ids[key] for key in (long, *keys[0], *keys[1])])
        counts.append(len(driver.results))
    assert found[0] == found[1]
    assert counts[1] < counts[0] / 2


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_places_that_follow_are_those_that_the_page_tables_give(rows: int) -> None:
    """The decode attention of FlashInfer derives them until a sequence begins a page. Padding stays where it is."""
    chance = np.random.default_rng(rows)
    tables = chance.permutation(rows * 8).astype(np.int32).reshape(rows, 8)
    lengths, slots = chance.integers(0, 90, rows), np.arange(rows)
    pool = torch.zeros(rows * 8 + 1, 2, 16, 1, 1)
    attention: Any = SimpleNamespace(pools=[pool], page_size=16)
    shape = AttentionShape(sequences=5, tokens=1, pages=8, causal=True)
    made, fresh = FlashInferDecode(attention, shape), FlashInferDecode(attention, shape)
    made.values(AttentionMetadata.of(slots, lengths, tables))
    anew = 0
    for step in range(1, 30):
        metadata = AttentionMetadata.of(slots, lengths + step, tables)
        wanted, found = fresh.values(metadata), made.following()
        if found is None:
            anew += 1
            found = made.values(metadata)
            assert ((lengths + step) % 16 == 0).any()
        assert all(np.array_equal(found[name], wanted[name]) for name in ("places", "last"))
    assert anew == len({step for step in range(1, 30) for length in lengths if (length + step) % 16 == 0})


def test_a_batch_with_a_loop_that_emits_a_port_has_single_steps() -> None:
    driver = driver_of(8, (4,))
    driver.open(0, SamplingParams(), 90)
    driver.prefill(0, prompt(0, 4))
    plain = driver.decode(0, 60)
    driver.open(1, SamplingParams(), 60)
    driver.prefill(1, prompt(1, 4))
    loop = LoopSpec(max_iters=20, carry={"token": "token"}, stop_port="token", emit=("hidden",))
    emitting = driver.submit(1, loop=loop, outputs=("token",))
    driver.run()
    assert [item.iteration for item in driver.emissions[emitting]] == [*range(20)]
    assert len(driver.ids[plain]) == 60 and len(driver.results) < 45
