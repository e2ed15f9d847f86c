"""Resident loops with state, random numbers and a stream on CUDA: captured steps against the CPU reference."""

from __future__ import annotations

import pytest
import torch

from mstar_core.engine.base import Handle
from mstar_core.engine.kv.engine import KVCacheEngine
from tests.engine.tiny_engine import Driver
from tests.engine.tiny_talker import GROUPS, SPEECHES, Talk, TinyTalker, make_talker, reference, speak

pytestmark = pytest.mark.gpu

EXPECTED = [reference(speech) for speech in SPEECHES]


def talker(cuda: torch.device, **changes: object) -> KVCacheEngine:
    return make_talker(device=cuda, module=TinyTalker().to(cuda), **changes)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("graphs", [(), (1, 4), (8,)])
def test_frames_and_ids_are_those_of_the_cpu(graphs: tuple[int, ...], lookahead: int, cuda: torch.device) -> None:
    engine = talker(cuda, graphs=graphs, lookahead=lookahead)
    assert speak(engine, SPEECHES, lookahead) == EXPECTED
    for speech, expected in zip(SPEECHES, EXPECTED, strict=True):
        assert speak(engine, [speech], lookahead) == [expected]
    counts = engine.graph_counts
    assert counts is None if not graphs else counts is not None and counts.hits > 20


@pytest.mark.parametrize("graphs", [(), (8,)])
def test_pages_come_back_from_the_host_unchanged(graphs: tuple[int, ...], cuda: torch.device) -> None:
    engine = talker(cuda, graphs=graphs, lookahead=1, num_pages=16)
    assert speak(engine, SPEECHES, 1) == EXPECTED
    assert engine.memory().preempted > 0


def test_late_items_change_no_captured_step(cuda: torch.device) -> None:
    driver = Driver(talker(cuda, graphs=(1, 8), lookahead=1), 1)
    talks = [Talk(driver, handle, speech).open() for handle, speech in enumerate(SPEECHES)]
    for turn in range(400):
        is_idle = not driver.turn()
        for talk in talks[turn % 2 :: 2] if turn % 3 == 0 or is_idle else ():
            talk.feed(1 + talk.handle % 2)
    assert [talk.result for talk in talks] == EXPECTED


def test_emitted_frames_stay_on_the_device_or_come_in_one_copy(cuda: torch.device) -> None:
    for host in ((), ("frame",)):
        driver = Driver(talker(cuda, graphs=(8,), lookahead=1), 1)
        talks = [Talk(driver, handle, SPEECHES[1]).open(host_emit=host) for handle in range(3)]
        for talk in talks:
            talk.feed()
        driver.run()
        frame = driver.emissions[talks[0].loop][0].outputs["frame"]
        assert frame.is_cuda == (not host) and frame.shape == (GROUPS,)
        assert [talk.result for talk in talks] == [EXPECTED[1]] * 3
        for talk in talks:
            driver.engine.close(Handle(talk.handle))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_call_of_a_step_waits_for_the_device(cuda: torch.device) -> None:
    """A launch and the delivery of items synchronise nothing; only `collect` waits, for ids that it needs."""
    driver = Driver(talker(cuda, graphs=(8,), lookahead=1), 1)
    talks = [Talk(driver, handle, SPEECHES[1]).open() for handle in range(4)]
    for talk in talks:
        talk.feed(6)
    for _ in range(4):
        driver.turn()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for talk in talks:
            talk.feed()
        running = driver.engine.launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert running is not None
    driver.running.append(running)
    driver.run()
    assert [talk.result for talk in talks] == [EXPECTED[1]] * 4
