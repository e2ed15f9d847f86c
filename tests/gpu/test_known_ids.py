"""Known ids on CUDA: one pass, then captured decode steps, with loops of ids alone and loops that keep state."""

from __future__ import annotations

import pytest
import torch

from mstar_core.engine.base import Handle
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.test_known_ids import IDS, SAMPLINGS, STEPS, others, talk_again, whole
from tests.engine.tiny_engine import Driver, TinyLM, make_engine
from tests.engine.tiny_talker import SPEECHES, TinyTalker, make_talker, reference

pytestmark = pytest.mark.gpu

SIZES = CaptureSizes(decode=(1, 4), prefill=(16, 64))


def lm(cuda: torch.device) -> KVCacheEngine:
    return make_engine(device=cuda, module=TinyLM().to(cuda), graphs=SIZES, lookahead=1)


def go_on(engine: KVCacheEngine, known: list[int], sampling: SamplingParams) -> tuple[Driver, list[int]]:
    """Run one new attempt. Returns its driver and all its ids."""
    driver = Driver(engine, 1)
    driver.open(0, sampling)
    first = driver.prefill(0, IDS, known=known[0])
    loop = driver.decode(0, STEPS, known=tuple(known[1:]))
    driver.run()
    assert not driver.failed, driver.failed
    engine.close(Handle(0))
    return driver, [int(driver.done[first].outputs["token"]), *driver.ids[loop]]


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_captured_steps_go_on_from_known_ids_as_on_the_cpu(kind: str, cuda: torch.device) -> None:
    engine, expected = lm(cuda), whole(SAMPLINGS[kind])
    for cut in (1, 2, 9, STEPS):
        assert go_on(engine, expected[:cut], SAMPLINGS[kind])[1] == expected
    counts = engine.graph_counts
    assert counts is not None and counts.prefill_hits
    assert counts.hits > STEPS or SAMPLINGS[kind].adjusts, "a variant is captured when the worker is idle"


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_diverged_history_is_true_for_captured_steps(kind: str, cuda: torch.device) -> None:
    engine, forced = lm(cuda), others(whole(SAMPLINGS[kind])[:8])
    _, history = go_on(engine, forced, SAMPLINGS[kind])
    assert history[:8] == forced
    assert go_on(engine, history[:13], SAMPLINGS[kind])[1] == history


@pytest.mark.parametrize("graphs", [(), (1, 8)])
def test_known_frames_take_one_pass_and_captured_steps_go_on(graphs: tuple[int, ...], cuda: torch.device) -> None:
    engine = make_talker(device=cuda, module=TinyTalker().to(cuda), graphs=graphs, lookahead=1)
    driver = Driver(engine, 1)
    handle, talks = 0, []
    for speech in SPEECHES:
        ids, frames = reference(speech)
        for cut in (1, 5, len(frames)):
            talks.append((talk_again(driver, handle, speech, ids[: cut + 1], frames[:cut]), (ids, frames)))
            handle += 1
    for talk, _ in talks:
        talk.feed()
    driver.run()
    assert not driver.failed, driver.failed
    assert [talk.result for talk, _ in talks] == [expected for _, expected in talks]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_launch_of_known_iterations_waits_for_nothing(cuda: torch.device) -> None:
    engine = make_talker(device=cuda, module=TinyTalker().to(cuda), graphs=(8,), lookahead=1)
    driver = Driver(engine, 1)
    ids, frames = reference(SPEECHES[1])
    talk = talk_again(driver, 0, SPEECHES[1], ids[:9], frames[:8])
    driver.run()
    talk.feed(8)
    torch.cuda.set_sync_debug_mode("error")
    try:
        running = engine.launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert running is not None and engine.collect(running).emissions
