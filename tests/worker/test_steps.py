"""Steps in flight: what is done is collected, whatever else is not; a node's own steps keep their order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mstar_core.engine.base import Pressure, StepResult
from mstar_core.engine.runner import NodeRunner
from mstar_core.worker.steps import LEAST_NAP_S, FairShare, Steps, no_range, ranges_on


class SlowRunner(NodeRunner):
    """Steps that are done when the test says so."""

    def __init__(self, name: str, ready: int = 100, lookahead: int = 1) -> None:
        self.name = name
        self.ready = ready
        self.launched = 0
        self.collected: list[int] = []
        self.done: set[int] = set()
        self.is_patient = False
        self.feeds = False
        self._lookahead = lookahead

    def open(self, *_: Any, **__: Any) -> None: ...

    def submit(self, *_: Any, **__: Any) -> None: ...

    def close(self, *_: Any, **__: Any) -> None: ...

    def pressure(self) -> Pressure:
        in_flight = self.launched - len(self.collected)
        ready = 0 if in_flight > self._lookahead else self.ready
        return Pressure(ready=ready, oldest_s=time.monotonic(), is_patient=self.is_patient, feeds=self.feeds)

    def launch(self) -> int | None:
        self.ready -= 1
        self.launched += 1
        return self.launched

    def is_done(self, running: Any) -> bool:
        return running in self.done

    def collect(self, running: Any) -> StepResult:
        self.collected.append(running)
        return StepResult(rows=1, duration_s=0.001)


def steps_of(*runners: SlowRunner, lookahead: int = 1) -> Steps:
    found = {runner.name: runner for runner in runners}
    return Steps(runners=found, scheduler=FairShare(found), lookahead=lookahead)


def turn(steps: Steps) -> int:
    launched = steps.launch()
    return sum(1 for _ in steps.collect(launched))


def test_a_step_that_waited_for_ids_is_launched_before_they_are_routed() -> None:
    node = DecidingRunner("LLM", lookahead=0)
    steps = steps_of(node)
    assert steps.launch() == ["LLM"]
    for number in range(1, 4):
        node.done.add(number)
        for _ in steps.collect([]):
            assert node.launched == number + 1 and steps.count == 1
    other = SlowRunner("LLM", lookahead=0)
    steps = steps_of(other)
    steps.launch()
    other.done.add(1)
    for _ in steps.collect([]):
        assert other.launched == 1, "a step that its results may join is launched behind them"


class DecidingRunner(SlowRunner):
    """The ids of a step decide the masks of the next one."""

    def collect(self, running: Any) -> StepResult:
        result = super().collect(running)
        result.decides = True
        return result


class BlockedRunner(SlowRunner):
    """Has rows that turn out to wait for room."""

    def launch(self) -> int | None:
        return None


def test_a_node_whose_rows_turn_out_to_wait_leaves_its_turn_to_another() -> None:
    blocked, scorer = BlockedRunner("LLM", lookahead=0), SlowRunner("scorer", lookahead=0)
    steps = steps_of(blocked, scorer, lookahead=0)
    assert steps.launch() == ["scorer"]


def test_a_slow_codec_step_does_not_hold_back_decode_steps() -> None:
    lm, codec = SlowRunner("LLM"), SlowRunner("codec", lookahead=0)
    steps = steps_of(lm, codec)
    turn(steps)
    assert (lm.launched, codec.launched) == (1, 1)
    for number in range(1, 6):
        lm.done.add(number)
        turn(steps)
    assert lm.collected == [1, 2, 3, 4, 5] and lm.launched >= 6
    assert not codec.collected and codec.launched == 1
    codec.done.add(1)
    turn(steps)
    assert codec.collected == [1]


def test_the_next_step_is_launched_before_the_one_before_it_is_collected() -> None:
    lm = SlowRunner("LLM")
    steps = steps_of(lm)
    lm.done.update(range(1, 10))
    assert turn(steps) == 0 and (lm.launched, lm.collected) == (1, [])
    assert turn(steps) == 1 and (lm.launched, lm.collected) == (2, [1])


def test_the_last_step_is_collected_though_nothing_follows_it() -> None:
    lm = SlowRunner("LLM", ready=1)
    steps = steps_of(lm)
    lm.done.add(1)
    turn(steps)
    assert turn(steps) == 1 and steps.count == 0


def test_steps_of_a_node_are_collected_in_order() -> None:
    lm = SlowRunner("LLM")
    steps = steps_of(lm)
    turn(steps)
    turn(steps)
    lm.done.add(2)
    assert turn(steps) == 0
    lm.done.add(1)
    turn(steps)
    turn(steps)
    assert lm.collected == [1, 2]


def test_without_lookahead_one_node_steps_at_a_time_and_shares_are_fair() -> None:
    lm, codec = SlowRunner("LLM", lookahead=0), SlowRunner("codec", lookahead=0)
    steps = steps_of(lm, codec, lookahead=0)
    for _ in range(6):
        assert turn(steps) == 1 and steps.count == 0
    assert lm.collected and codec.collected


def test_rows_that_can_wait_do_so_while_others_run_and_no_longer() -> None:
    lm, codec = SlowRunner("LLM", ready=1), SlowRunner("codec", lookahead=0)
    codec.is_patient = True
    steps = steps_of(lm, codec)
    turn(steps)
    turn(steps)
    assert (lm.launched, codec.launched) == (1, 0)
    lm.done.add(1)
    turn(steps)
    turn(steps)
    assert (lm.collected, codec.launched) == ([1], 1)


def test_a_node_that_feeds_others_waits_for_more_rows_while_they_have_all_their_steps() -> None:
    """The reader's next step is launched behind what was made for it, not beside it."""
    cameras, lm = SlowRunner("cameras", ready=0), SlowRunner("LLM", ready=3)
    cameras.feeds = True
    steps = steps_of(lm, cameras)
    turn(steps)
    turn(steps)
    cameras.ready = 2
    turn(steps)
    assert (lm.launched, cameras.launched) == (2, 0)
    lm.done.add(1)
    turn(steps)
    assert lm.collected == [1] and steps.launch() == ["cameras"]
    assert steps.launch() == ["cameras"] and steps.launch() == ["LLM"]


def test_a_node_that_feeds_others_does_not_wait_with_a_full_step() -> None:
    cameras, lm = SlowRunner("cameras", ready=9), SlowRunner("LLM")
    cameras.feeds = True
    steps = steps_of(lm, cameras)
    assert [steps.launch(), steps.launch(), steps.launch()] == [["cameras", "LLM"], ["cameras"], ["LLM"]]
    cameras.ready = 7
    cameras.collected += [1, 2]
    assert steps.launch() == []
    cameras.ready = 8
    assert steps.launch() == ["cameras"]


def test_a_node_that_feeds_an_idle_one_begins_at_once() -> None:
    cameras, lm = SlowRunner("cameras", ready=1), SlowRunner("LLM", ready=0)
    cameras.feeds = True
    assert steps_of(lm, cameras).launch() == ["cameras"]


def test_waiting_ends_with_a_step_that_is_done_or_with_a_call() -> None:
    lm = SlowRunner("LLM")
    steps = steps_of(lm)
    turn(steps)
    answers = iter((False, False, True))
    steps.wait(lambda: next(answers))
    assert next(answers, None) is None
    lm.done.add(1)
    steps.wait(lambda: False)


def test_the_time_of_the_host_is_counted() -> None:
    lm = SlowRunner("LLM", ready=1)
    steps = steps_of(lm)
    lm.done.add(1)
    turn(steps)
    for _ in steps.collect([]):
        time.sleep(0.01)
    found = steps.statistics["LLM"]
    assert found.steps == 1 and found.route_s >= 0.01 and found.launch_s >= 0.0


def test_a_profiler_sees_a_range_around_each_launch_and_each_collection() -> None:
    lm = SlowRunner("LLM")
    steps, seen = steps_of(lm, lookahead=0), []

    @contextmanager
    def marked(what: str, node: str) -> Iterator[None]:
        before = (lm.launched, len(lm.collected))
        yield
        seen.append((what, node, lm.launched - before[0], len(lm.collected) - before[1]))

    steps.ranges = marked
    lm.done.update((1, 2))
    turn(steps)
    turn(steps)
    assert seen == [("launch", "LLM", 1, 0), ("collect", "LLM", 0, 1)] * 2


def test_marks_are_made_on_gpus_alone_and_when_they_are_wanted() -> None:
    assert ranges_on("cpu", is_wanted=True) is no_range
    assert ranges_on("cuda:0", is_wanted=False) is no_range
    assert ranges_on("cuda:0", is_wanted=True) is not no_range


class FakeTime:
    """A clock that moves by a microsecond when it is read, and by naps. Owned by a test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.naps: list[float] = []

    def clock(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(self.now)
        self.now += seconds


def test_a_wait_looks_without_naps_for_as_long_as_it_spins_and_sees_what_comes() -> None:
    """Beyond that it naps: a step of seconds costs no core."""
    lm, fake = SlowRunner("LLM"), FakeTime()
    steps = steps_of(lm)
    steps.clock, steps.sleep, steps.spin_s = fake.clock, fake.sleep, 0.2
    turn(steps)
    begun, looks = fake.now, []

    def is_called() -> bool:
        looks.append(fake.now - begun)
        if looks[-1] > 0.5:
            lm.done.add(1)
        return False

    steps.wait(is_called)
    spun = [look for look in looks if look < 0.2]
    assert len(spun) > 50_000 and min(fake.naps) - begun >= 0.2
    assert 100 < len(fake.naps) < 0.3 / LEAST_NAP_S and len(looks) - len(spun) <= len(fake.naps) + 1
    lm.done.clear()
    before = len(fake.naps)
    steps.wait(lambda: True)
    assert len(fake.naps) == before, "a message ends the wait at once"
