"""Requests that wait for slots or pages proceed once there is room, for any order of arrivals, sizes and ends."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Done, Handle, LoopSpec
from mstar_core.graph.declare.nodes import Attend, EngineHints
from tests.engine.recorded import RecordingCache
from tests.engine.test_kv_candidates import CARRY, START, context
from tests.engine.tiny_engine import WIDTH, Driver
from tests.engine.tiny_world import FRAME, TRIAL, WORLD, TinyWorld, make_world, numbers

ROWS = 6
"""Rows of all requests together in the tiny world."""


@dataclass
class Trial:
    """One request. rest: turns that another node takes between two steps of a scored rollout; None: the engine's own
    loop. wide: rows of the same loop once more behind it, 0 for none.
    """

    rows: int
    steps: int
    rest: int | None = None
    frames: int = 0
    attend: Attend = TRIAL
    wide: int = 0

    def moves(self, handle: int) -> Tensor:
        """Its actions, [K, h, WIDTH]."""
        return numbers(100 + handle, self.rows, self.steps, WIDTH)


@dataclass
class Play:
    """Plays the worker for several requests, and the nodes between their steps. ended: in order, with last frames."""

    driver: Driver
    trials: dict[int, Trial] = field(default_factory=dict)
    ended: dict[int, Tensor] = field(default_factory=dict)
    resting: list[tuple[int, int, int, Tensor]] = field(default_factory=list)

    def begin(self, handle: int, trial: Trial) -> None:
        self.trials[handle] = trial
        self.driver.open(handle, max_tokens=12)
        context(self.driver, handle, trial.frames)
        if trial.rest is None:
            self._roll(handle, trial)
        else:
            self._step(handle, 0, START)

    def cancel(self, handle: int) -> None:
        self.driver.engine.close(Handle(handle))
        self.trials.pop(handle, None)
        self.resting = [each for each in self.resting if each[0] != handle]

    def turn(self) -> bool:
        """One turn; False when nothing is under way any more, here or between two steps."""
        going = self.driver.turn()
        waiting, self.resting = self.resting, []
        for handle, step, left, frame in waiting:
            if left:
                self.resting.append((handle, step, left - 1, frame))
            else:
                self._step(handle, step, frame)
        return going or bool(waiting)

    def run(self, limit: int = 4000) -> Play:
        for _ in range(limit):
            if not self.turn():
                break
        assert not self.driver.failed, [str(each.error) for each in self.driver.failed.values()]
        assert not self.trials, f"no request makes progress; left: {self.trials}"
        memory = self.driver.engine.memory()
        assert (memory.pages_used, memory.slots_used) == (0, 0)
        return self

    def _roll(self, handle: int, trial: Trial) -> None:
        loop = LoopSpec(max_iters=trial.steps, carry=CARRY, fused=True)
        moves = trial.moves(handle)
        key = self.driver.submit(
            handle,
            inputs={"frame": START, "actions": moves if trial.rows > 1 else moves[0]},
            rows=trial.rows,
            loop=loop,
            attend=trial.attend,
            outputs=("next_frame",),
            sample=False,
        )
        self.driver.on_done[key] = lambda done: self._rolled(handle, done)

    def _rolled(self, handle: int, done: Done) -> None:
        trial = self.trials.get(handle)
        if trial is not None and trial.wide:
            self.trials[handle] = replace(trial, rows=trial.wide, wide=0)
            self._roll(handle, self.trials[handle])
        else:
            self._end(handle, done)

    def _step(self, handle: int, step: int, frame: Tensor) -> None:
        trial = self.trials[handle]
        moves = trial.moves(handle)
        key = self.driver.submit(
            handle,
            rows=trial.rows,
            attend=trial.attend,
            outputs=("next_frame",),
            sample=False,
            inputs={"frame": frame, "actions": moves if trial.rows > 1 else moves[0], "$step": torch.tensor(step)},
        )
        self.driver.on_done[key] = lambda done: self._stepped(handle, step, done)

    def _stepped(self, handle: int, step: int, done: Done) -> None:
        trial = self.trials.get(handle)
        if trial is None:
            return
        if step + 1 < trial.steps:
            assert trial.rest is not None
            self.resting.append((handle, step + 1, trial.rest, done.outputs["next_frame"]))
        else:
            self._end(handle, done)

    def _end(self, handle: int, done: Done) -> None:
        if self.trials.pop(handle, None) is not None:
            self.ended[handle] = done.outputs["next_frame"]
            self.driver.engine.close(Handle(handle))


def play(lookahead: int = 0, rows: int = ROWS, **changes: Any) -> Play:
    """An engine with slots for as many candidates, and one for each of eight requests."""
    assert WORLD.kv is not None
    sizes = (1, 2, 4) if "captures" in changes else ()
    spec = replace(WORLD, kv=replace(WORLD.kv, rows=rows), hints=EngineHints(capture_sizes=sizes))
    settings: dict[str, Any] = {"num_pages": 256, "max_slots": 8 + rows, **changes}
    engine = make_world(spec=spec, module=TinyWorld(), lookahead=lookahead, **settings)
    found = Play(Driver(engine, lookahead))
    if sizes:  # with captured steps, few candidates enter per step
        found.begin(99, Trial(rows=5, steps=2, rest=1))
        found.run()
        while engine.idle():
            pass
        assert found.ended.pop(99) is not None and engine.counters()["graphs_captured"] > 0
    return found


@pytest.mark.parametrize("lookahead", [0, 1])
def test_requests_whose_candidates_do_not_fit_together_run_in_turn(lookahead: int) -> None:
    """The first is between two steps when the others find no slots; its next step still runs."""
    found = play(lookahead)
    for handle in range(4):
        found.begin(handle, Trial(rows=5, steps=3, rest=2))
    found.run()
    assert list(found.ended) == [0, 1, 2, 3]


def test_candidates_enter_while_an_older_request_waits_for_slots() -> None:
    """With captured steps a scheduling pass takes few candidates; the later ones have their slots all the same."""
    found = play(graphs=(1,), captures=RecordingCache())
    found.begin(0, Trial(rows=6, steps=1, rest=1, frames=1))
    found.begin(1, Trial(rows=5, steps=2, rest=1))
    found.run()
    assert set(found.ended) == {0, 1}


def test_a_request_waiting_for_slots_takes_no_pages_from_slot_holders() -> None:
    """The oldest computes its context while the second takes all slots; then each needs what the other has."""
    found = play(token_budget=3)
    found.begin(0, Trial(rows=5, steps=2, rest=1, frames=4))
    found.turn()
    found.begin(1, Trial(rows=5, steps=3, rest=3))
    found.run()
    assert set(found.ended) == {0, 1}


@pytest.mark.parametrize("num_pages", [4 + 5, 4 + 8, 4 + 15])
def test_a_request_waiting_for_slots_gives_pages_to_slot_holders(num_pages: int) -> None:
    found = play(token_budget=3, num_pages=num_pages)
    found.begin(0, Trial(rows=5, steps=1, rest=1, frames=4))
    found.turn()
    found.begin(1, Trial(rows=5, steps=3, rest=3) if num_pages > 4 + 10 else Trial(rows=4, steps=2, rest=3))
    found.run()
    assert set(found.ended) == {0, 1}


def test_candidates_that_take_turns_wait_behind_lasting_ones() -> None:
    """Younger requests hold all slots and run to their end although an older one waits for a slot."""
    found = play(token_budget=3)
    found.begin(0, Trial(rows=9, steps=2, frames=3))
    found.turn()
    for handle in (1, 2):
        found.begin(handle, Trial(rows=3, steps=3, rest=2))
    found.run()
    assert set(found.ended) == {0, 1, 2}


def test_a_context_is_recomputed_only_when_a_candidate_has_a_slot() -> None:
    """Otherwise it and the candidates with slots would preempt each other forever."""
    found = play(token_budget=3, num_pages=18)
    found.begin(0, Trial(rows=9, steps=2, frames=3))
    found.turn()
    found.begin(1, Trial(rows=6, steps=3, rest=3))
    found.run(limit=200)
    assert found.driver.engine.memory().preempted == 1 and list(found.ended) == [1, 0]
    found = play(token_budget=3, num_pages=12)
    found.begin(0, Trial(rows=9, steps=2, frames=4))
    found.turn()
    found.begin(1, Trial(rows=3, steps=4, rest=1))
    found.begin(2, Trial(rows=3, steps=3, rest=1))
    assert set(found.run(limit=400).ended) == {0, 1, 2}


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_request_waiting_for_slots_returns_its_spare_ones(lookahead: int) -> None:
    found = play(lookahead)
    for handle in range(3):
        found.begin(handle, Trial(rows=2, steps=2, attend=FRAME, wide=5))
    found.run()
    assert list(found.ended) == [0, 1, 2] and all(len(frames) == 5 for frames in found.ended.values())


def test_the_wait_of_a_request_is_reported_while_others_run() -> None:
    found = play(num_pages=12)
    found.begin(0, Trial(rows=6, steps=2, rest=2))
    found.begin(1, Trial(rows=6, steps=2, rest=2))
    told = []
    while found.turn():
        told += [why for handle, (_, why) in found.driver.engine.pages_and_waits().items() if handle == 1]
    assert told[0] == "waits for slots" and "" in told and set(told) == {"waits for slots", ""}
    assert told == sorted(told, reverse=True), "it waits without a break, and then no more"


def test_plain_requests_pass_those_that_wait_for_candidate_slots() -> None:
    found = play()
    for handle in range(3):
        found.begin(handle, Trial(rows=6, steps=3, rest=6))
    found.begin(3, Trial(rows=1, steps=2))
    found.run()
    assert next(iter(found.ended)) == 3


def test_many_small_requests_do_not_overtake_a_large_one() -> None:
    found = play()
    found.begin(0, Trial(rows=3, steps=2, rest=2))
    found.turn()
    found.begin(1, Trial(rows=6, steps=2, rest=2))
    coming = deque(range(2, 30))
    while coming or found.trials:
        if coming and len(found.trials) < 6:
            found.begin(coming.popleft(), Trial(rows=3, steps=2, rest=2))
        assert found.turn() or coming or not found.trials
    assert list(found.ended)[:2] == [0, 1]


def trial_of(chance: random.Random) -> Trial:
    kind = chance.choice(["scored", "scored", "turns", "one", "stays"])
    frames, steps = chance.randint(0, 3), chance.randint(1, 3)
    if kind == "scored":
        return Trial(rows=chance.randint(2, ROWS), steps=steps, rest=chance.randint(0, 4), frames=frames)
    if kind == "turns":
        return Trial(rows=chance.randint(2, 2 * ROWS), steps=steps, frames=frames)
    if kind == "one":
        return Trial(rows=1, steps=steps, frames=frames)
    return Trial(rows=chance.randint(2, 3), steps=steps, frames=frames, attend=FRAME)


@pytest.mark.parametrize("is_captured", [False, True], ids=["plain", "captured"])
@pytest.mark.parametrize("seed", range(40))
def test_any_mixture_of_requests_completes(seed: int, is_captured: bool) -> None:
    chance = random.Random(seed)
    changes: dict[str, Any] = {"graphs": (1,), "captures": RecordingCache()} if is_captured else {}
    found = play(
        chance.randint(0, 1),
        num_pages=chance.choice([24, 30, 44, 200]),
        token_budget=chance.choice([3, 9, 64]),
        page_size=chance.choice([3, 3, 4]),
        **changes,
    )
    coming = {handle: trial_of(chance) for handle in range(12)}
    for _ in range(4000):
        if coming and len(found.trials) < 8 and chance.random() < 0.4:
            handle = min(coming)
            found.begin(handle, coming.pop(handle))
        if found.trials and chance.random() < 0.02:
            found.cancel(chance.choice(sorted(found.trials)))
        if not found.turn() and not coming:
            break
    found.run()
