"""Resident loops with state, random numbers and a stream: equal to a plain reference however they are run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from mstar_core.engine.base import Handle, LoopSpec
from mstar_core.engine.transfers import HostCopy
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.tiny_engine import Driver
from tests.engine.tiny_talker import CARRY, GROUPS, SPEECHES, Speech, Talk, TinyTalker, make_talker, reference, speak

EXPECTED = [reference(speech) for speech in SPEECHES]


def spoken(**changes: object) -> Driver:
    lookahead = int(changes.get("lookahead", 0))  # type: ignore[call-overload]
    return Driver(make_talker(**changes), lookahead)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", [(), (1, 4), (8,)])
def test_alone_and_batched_equal_the_reference(graphs: tuple[int, ...], lookahead: int) -> None:
    for speech, expected in zip(SPEECHES, EXPECTED, strict=True):
        assert speak(make_talker(graphs=graphs, lookahead=lookahead), [speech], lookahead) == [expected]
    engine = make_talker(graphs=graphs, lookahead=lookahead)
    assert speak(engine, SPEECHES, lookahead) == EXPECTED
    counts = engine.graph_counts
    assert counts is None if not graphs else counts is not None and counts.hits > 10
    assert len(EXPECTED[0][1]) == 9 and len({str(frames) for _, frames in EXPECTED}) == 5


@pytest.mark.parametrize("graphs", [(), (1, 8)])
def test_decode_steps_hold_all_sequences(graphs: tuple[int, ...]) -> None:
    module = TinyTalker()
    engine = make_talker(module=module, graphs=graphs)
    module.steps.clear()
    speak(engine, SPEECHES)
    assert max(module.steps) >= 5 and len(module.steps) == 20, "as many steps as the longest loop has iterations"


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", [(), (1, 8)])
@pytest.mark.parametrize("pace", [1, 3])
def test_late_items_change_nothing(pace: int, graphs: tuple[int, ...], lookahead: int) -> None:
    driver = spoken(graphs=graphs, lookahead=lookahead)
    talks = [Talk(driver, handle, speech).open() for handle, speech in enumerate(SPEECHES)]
    for turn in range(400):
        is_idle = not driver.turn()
        for talk in talks[turn % 2 :: 2] if turn % pace == 0 or is_idle else ():
            talk.feed(1 + talk.handle % 2)
        if all(talk.loop in driver.done for talk in talks):
            break
    assert [talk.result for talk in talks] == EXPECTED


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_sequence_without_its_item_costs_no_step_and_blocks_no_other(lookahead: int) -> None:
    module = TinyTalker()
    driver = spoken(module=module, lookahead=lookahead)
    waits, goes = (Talk(driver, handle, SPEECHES[1]).open() for handle in range(2))
    waits.feed(4)
    goes.feed()
    driver.run()
    assert goes.result == EXPECTED[1]
    assert waits.result == (EXPECTED[1][0][:5], EXPECTED[1][1][:4])
    assert len(module.steps) == 14 and module.steps.count(2) == 4
    pressure = driver.engine.pressure()
    assert (pressure.ready, pressure.waiting) == (0, 0) and driver.engine.launch() is None
    assert driver.engine.pages_and_waits()[Handle(0)][1] == "waits for input text"
    waits.feed()
    assert driver.engine.pressure().ready == 1 and driver.engine.pages_and_waits()[Handle(0)][1] == ""
    driver.run()
    assert waits.result == EXPECTED[1]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", [(), (8,)])
def test_a_stop_id_ends_the_loop_and_gets_no_frame(graphs: tuple[int, ...], lookahead: int) -> None:
    ids, frames = EXPECTED[4]
    stop = ids[6]
    first = ids.index(stop)
    assert first > 1
    driver = spoken(graphs=graphs, lookahead=lookahead)
    speech = Speech(**{**SPEECHES[4].__dict__, "stop": stop})
    talk = Talk(driver, 0, speech).open()
    other = Talk(driver, 1, SPEECHES[0]).open()
    talk.feed()
    other.feed()
    driver.run()
    assert talk.result == (ids[: first + 1], frames[:first]) == reference(speech)
    done = driver.done[talk.loop]
    assert (done.reason, done.iterations, int(done.outputs["code0"])) == ("stop", first, stop)
    assert other.result == EXPECTED[0]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", [(), (8,)])
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_second_loop_goes_on_from_the_state_of_the_first(
    reason: str, graphs: tuple[int, ...], lookahead: int
) -> None:
    """A step that ran ahead of a stop leaves no state, no item and no random number behind."""
    ids, frames = EXPECTED[1]
    cut = 5 if reason == "length" else ids.index(ids[6])
    driver = spoken(graphs=graphs, lookahead=lookahead)
    talk = Talk(driver, 0, SPEECHES[1])
    talk.speech = Speech(**{**SPEECHES[1].__dict__, "steps": cut if reason == "length" else 14})
    talk.open(stop_ids=(ids[cut],) if reason == "stop" else ())
    talk.feed()
    driver.run()
    assert (driver.done[talk.loop].reason, talk.frames) == (reason, frames[:cut])
    second = Talk(driver, 0, SPEECHES[1], first=talk.first, fed=cut)
    second.loop = second.decode(14 - cut)
    second.feed()
    driver.run()
    assert talk.ids + second.ids[1:] == ids and talk.frames + second.frames == frames


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("fed_late", [False, True])
def test_a_loop_may_end_with_its_stream(fed_late: bool, lookahead: int) -> None:
    driver = spoken(lookahead=lookahead)
    talk = Talk(driver, 0, SPEECHES[0]).open(after_end="stop")
    nothing = Talk(driver, 1, SPEECHES[2]).open(after_end="stop")
    talk.feed(2 if fed_late else None)
    driver.run()
    talk.feed(ended=False)
    driver.run()
    talk.feed(0, ended=True)
    nothing.feed()
    driver.run()
    assert talk.result == (EXPECTED[0][0][:4], EXPECTED[0][1][:3])
    assert (driver.done[talk.loop].reason, driver.done[talk.loop].iterations) == ("done", 3)
    assert nothing.frames == [] and driver.done[nothing.loop].reason == "done"
    driver.engine.close(Handle(0))
    driver.engine.close(Handle(1))
    assert driver.engine.memory().pages_used == 0


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", [(), (8,)])
def test_preemption_changes_nothing(graphs: tuple[int, ...], lookahead: int) -> None:
    engine = make_talker(graphs=graphs, lookahead=lookahead, num_pages=16)
    assert speak(engine, SPEECHES, lookahead) == EXPECTED
    assert engine.memory().preempted > 0 and engine.memory().pages_used == 0


def test_a_preempted_sequence_that_waits_for_its_stream_comes_back_unchanged() -> None:
    driver = spoken(num_pages=8)
    waits = Talk(driver, 1, SPEECHES[1])
    goes = Talk(driver, 0, SPEECHES[3]).open()
    waits.open()
    waits.feed(6)
    goes.feed()
    driver.run()
    assert goes.result == EXPECTED[3] and driver.engine.memory().preempted == 1
    driver.engine.close(Handle(0))
    assert driver.engine.memory().pages_used == 0, "it takes no page back before it can use it"
    assert driver.engine.pressure().ready == 0
    waits.feed()
    driver.run()
    assert waits.result == EXPECTED[1]


def test_the_seed_decides_about_frames_and_ids() -> None:
    one, same, other = (Speech(sampling=SamplingParams(temperature=0.0, seed=seed), steps=12) for seed in (3, 3, 4))
    found = speak(make_talker(), [one, same, other])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("turns", [1, 2, 5])
def test_a_cancelled_request_frees_everything(turns: int, lookahead: int) -> None:
    driver = spoken(lookahead=lookahead)
    talk, other = Talk(driver, 0, SPEECHES[1]).open(), Talk(driver, 1, SPEECHES[3]).open()
    talk.feed(3)
    other.feed()
    for _ in range(turns):
        driver.turn()
    driver.engine.close(Handle(0))
    talk.feed()  # items on their way
    driver.run()
    assert other.result == EXPECTED[3]
    driver.engine.close(Handle(1))
    use = driver.engine.memory()
    assert use.pages_used == use.slots_used == 0 and driver.engine.pressure().ready == 0


def test_a_loop_that_the_rows_do_not_fit_cannot_take_a_stream() -> None:
    driver = spoken()
    driver.open(0)
    loop = LoopSpec(max_iters=3, carry=CARRY, stop_port="code0", feed="text")
    key = driver.submit(0, inputs={"code0": torch.tensor([1])}, loop=loop)
    driver.run()
    assert "cannot take its stream" in str(driver.failed[key].error)


def test_a_loop_without_starting_state_fails_alone() -> None:
    driver = spoken()
    talk = Talk(driver, 0, SPEECHES[0])
    driver.open(0)
    talk.loop = talk.decode(3)
    other = Talk(driver, 1, SPEECHES[1]).open()
    other.feed()
    driver.run()
    assert "nothing to start from" in str(driver.failed[talk.loop].error) and other.result == EXPECTED[1]


def test_a_failing_sequence_leaves_the_state_of_the_others() -> None:
    """The batch is run again one by one; the others take neither an item nor a state twice."""
    calls = 0

    def faults(handles: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 6 and Handle(0) in handles:  # type: ignore[operator]
            raise RuntimeError("this one is bad")

    driver = spoken(faults=faults)
    talks = [Talk(driver, handle, speech).open() for handle, speech in enumerate(SPEECHES)]
    for talk in talks:
        talk.feed()
    driver.run()
    assert talks[0].loop in driver.failed
    assert [talk.result for talk in talks[1:]] == EXPECTED[1:]


@pytest.mark.parametrize("graphs", [(), (8,)])
def test_frames_that_leave_the_process_are_copied_once_per_step(graphs: tuple[int, ...]) -> None:
    copied: list[tuple[int, ...]] = []

    def to_host(value: torch.Tensor) -> HostCopy:
        copied.append(tuple(value.shape))
        return HostCopy(value)

    driver = spoken(graphs=graphs, to_host=to_host)
    talks = [Talk(driver, handle, SPEECHES[1]).open(host_emit=("frame",)) for handle in range(3)]
    for talk in talks:
        talk.feed()
    driver.run()
    assert [talk.result for talk in talks] == [EXPECTED[1]] * 3 and copied == [(3, GROUPS)] * 14


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_items_steps_and_ends_changes_a_result(seed: int) -> None:
    """Random arrivals, sizes, stops and cancellations, with few pages and slots."""
    rng = random.Random(seed)
    lookahead = rng.choice([0, 1])
    sizes = {"num_pages": rng.choice([6, 8, 30]), "max_slots": rng.choice([2, 4, 16])}
    driver = spoken(lookahead=lookahead, graphs=rng.choice([(), (1, 4), (8,)]), **sizes)
    todo = [replace(rng.choice(SPEECHES), stop=rng.choice([-2, 9, 27])) for _ in range(rng.randrange(2, 7))]
    talks: list[Talk] = []
    cancelled: set[int] = set()
    for _ in range(2000):
        if todo and rng.random() < 0.3:
            talks.append(Talk(driver, len(talks), todo.pop()).open())
        for talk in talks:
            if talk.loop in driver.done or (talk.handle not in cancelled and rng.random() < 0.004):
                driver.engine.close(Handle(talk.handle))
                if talk.loop not in driver.done:
                    cancelled.add(talk.handle)
            elif rng.random() < 0.35:
                talk.feed(rng.choice([0, 1, 1, 2, 5]))
        for _ in range(rng.choice([0, 1, 1, 2])):
            driver.turn()
        if not todo and all(talk.loop in driver.done or talk.handle in cancelled for talk in talks):
            break
    driver.run()
    for talk in talks:
        driver.engine.close(Handle(talk.handle))
        if talk.handle not in cancelled:
            assert talk.result == reference(talk.speech)
    use = driver.engine.memory()
    assert not driver.failed and not todo and use.pages_used == use.slots_used == 0
