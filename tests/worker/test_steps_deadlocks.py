"""Heartbeats of a worker whose requests wait for memory: a wait that nothing here ends counts as work without steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.runner import NodeRunner
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.worker.loop import Worker
from mstar_core.worker.steps import FairShare, Steps
from tests.engine.tiny_engine import Driver, make_engine, prompt
from tests.engine.tiny_talker import SPEECHES, Talk, make_talker
from tests.worker.test_executor import Bench, InlineTransport

PAGES = 8


class Heart:
    """A life that records whether each heartbeat reports work."""

    stop_reason = None

    def __init__(self) -> None:
        self.beats: list[bool] = []

    def beat(self, now: float, *, work_ready: bool, steps: int) -> None:
        self.beats.append(work_ready)

    def wait_s(self, now: float) -> float:
        return 0.0

    def telemetry(self, *_: Any, **__: Any) -> None: ...


def beats(*runners: NodeRunner, turns: int = 20) -> list[bool]:
    """Let a worker with these nodes run, and return the reports of its last heartbeats, when nothing runs any more."""
    bench = Bench({})
    nodes = {runner.name: runner for runner in runners}
    heart = Heart()
    made = Worker(
        mailbox=cast(Any, SimpleNamespace(drain=list, wait=lambda *_, **__: False)),
        transport=cast(Any, InlineTransport()),
        life=cast(Any, heart),
        executor=bench.executor,
        outbox=bench.outbox,
        runners=nodes,
        steps=Steps(runners=nodes, scheduler=FairShare(nodes)),
    )
    made.report = cast(Any, SimpleNamespace(has_news=False, send=lambda *_, **__: None, idle_s=0.0, due=0.0))
    made.has_idle_work = False
    for _ in range(turns):
        made.turn()
    return heart.beats[-3:]


def submit(engine: KVCacheEngine, handle: int, tokens: int, loop: int = 0) -> None:
    inputs = {} if loop else {"tokens": torch.tensor(prompt(1, tokens))}
    job = Job(key=JobKey(10 * handle + bool(loop)), handle=Handle(handle), inputs=inputs, outputs=("token",))
    if loop:
        job.loop = LoopSpec(max_iters=loop, carry={"token": "token"})
    engine.submit(job)


def opened(*handles: int, **changes: object) -> KVCacheEngine:
    driver = Driver(make_engine(num_pages=PAGES, max_slots=2, **changes))
    for handle in handles:
        driver.open(handle, max_tokens=20)
    return driver.engine


def test_slots_that_nobody_returns_are_a_hang() -> None:
    engine = opened(1)
    engine._memory.slots.take(2, SamplingParams())  # a leak
    submit(engine, 1, 5)
    assert beats(engine) == [True] * 3


def test_pages_of_a_request_that_works_elsewhere_are_waited_for() -> None:
    engine = opened(1, 2)
    submit(engine, 1, 19)
    assert beats(engine) == [False] * 3, "its first job is done; it may go on at any time"
    submit(engine, 2, 19)
    assert engine.memory().pages_used == 5 and beats(engine) == [False] * 3
    engine.close(Handle(1))
    assert beats(engine) == [False] * 3 and engine.memory().pages_used == 5, "the other has run"


def test_a_loop_that_waits_for_its_stream_is_no_hang() -> None:
    engine = make_talker(max_slots=1)
    driver = Driver(engine)
    talks = [Talk(driver, handle, SPEECHES[1]).open() for handle in range(2)]
    talks[0].feed(2)
    assert beats(engine) == [False] * 3


def test_requests_that_run_are_at_work_and_an_idle_worker_is_not() -> None:
    engine = opened(1)
    assert beats(engine) == [False] * 3
    submit(engine, 1, 5)
    submit(engine, 1, 0, loop=12)
    assert beats(engine, turns=8) == [True] * 3
