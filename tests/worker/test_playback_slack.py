"""Sound that has begun is not starved by encoders and new prompts: a load in virtual time, on real workers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from mstar_core.conformance.clock import FakeClock
from mstar_core.conformance.fake_api import SampleRequest, SentRequest
from mstar_core.conformance.nodes import RuntimeSettings
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.engine.base import Handle, Job, JobKey
from mstar_core.engine.kv.model_runner import ModelRunner
from mstar_core.engine.slack import HOLD_LIMIT_S, MARGIN_S, Slack, StepCost
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.engine.steps.device import StepLimits, StepOutput
from mstar_core.engine.steps.plan import StepPlan
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.messages.flow import Playing
from mstar_core.plugin.processor import MediaPart
from mstar_core.worker.executor import Executor
from mstar_core.worker.state.playback import Playback, Sound
from tests.engine.fake_device import FakeNode
from tests.fakes.seeing_talker import FRAME_S, FRAME_VALUES, SPEC, VISION, Device, Processor, Vision, build

CLIENTS = 32
IMAGE = MediaPart(modality="image", data=b"")
MOST_TURNS = 6000


@dataclass
class Client:
    """A client that sends one request after the other. gaps: pauses of the sound that it heard."""

    starts: float
    left: int
    call: SentRequest | None = None
    sent: float = 0.0
    seen: int = 0
    dry_at: float | None = None
    gaps: int = 0
    first_sound: list[float] = field(default_factory=list)

    def take(self, now: float) -> None:
        assert self.call is not None
        new, self.seen = self.call.items[self.seen :], len(self.call.items)
        for item in (item for item in new if item.modality == "audio"):
            if self.dry_at is None:
                self.first_sound.append(now - self.sent)
            self.gaps += self.dry_at is not None and now > self.dry_at
            self.dry_at = max(now, self.dry_at or now) + item.array.size / FRAME_VALUES * FRAME_S


@dataclass
class Load:
    """Closed loop of clients, with images, answers of mixed lengths, and virtual time."""

    runtime: LocalRuntime
    device: Device
    clients: list[Client]

    @property
    def gaps(self) -> int:
        return sum(client.gaps for client in self.clients)

    @property
    def first_sound(self) -> list[float]:
        return sorted(each for client in self.clients for each in client.first_sound)


def run(
    folder: Path,
    *,
    yields: bool,
    each: int = 2,
    outputs: tuple[str, ...] = ("text", "audio"),
    ranks: int = 1,
    spread_s: float = 2.0,
) -> Load:
    device, chance = Device(), random.Random(5)
    settings = RuntimeSettings(
        slots=64, lookahead=1, page_size=64, max_seq_len=1024, prefix_cache=False, yields_to_sound=yields
    )
    runtime = LocalRuntime(SPEC, folder, settings, built=build(device), processor=Processor(), ranks=ranks)
    runtime.clock.tick, device.clock = 0.0, runtime.clock  # a report, due by real time, reads the clock
    clients = [Client(runtime.clock.now + spread_s * chance.random(), each) for _ in range(CLIENTS)]
    load = Load(runtime, device, clients)
    for _ in range(MOST_TURNS):
        waiting = [client for client in clients if client.left or client.call is not None]
        if not waiting:
            return load
        for client in waiting:
            if client.call is None and runtime.clock.now >= client.starts:
                params = {"frames": chance.randint(35, 100), "words": chance.randint(16, 40)}
                client.call = runtime.send(SampleRequest(text="x", media=(IMAGE,), outputs=outputs, params=params))
                client.sent, client.seen, client.dry_at, client.left = runtime.clock.now, 0, None, client.left - 1
        if not runtime.step():
            runtime.clock.sleep(1e-3)
        for client in waiting:
            if client.call is not None:
                client.take(runtime.clock.now)
                if client.call.outcome is not None:
                    assert client.call.outcome.status == "finished", client.call.outcome.cause
                    client.call = None
    raise AssertionError(f"the load does not end within {MOST_TURNS} turns")


def test_32_clients_with_images_hear_no_gaps(tmp_path: Path) -> None:
    before, after = run(tmp_path, yields=False), run(tmp_path, yields=True)
    assert before.gaps > 20 and after.gaps <= before.gaps // 20, (before.gaps, after.gaps)
    assert before.runtime.workers[0].executor.playback.underruns > 20
    p95 = after.first_sound[len(after.first_sound) * 95 // 100]
    assert len(after.first_sound) == 2 * CLIENTS and p95 <= 2.0, p95
    assert after.runtime.clock.now <= 1.1 * before.runtime.clock.now, "the throughput stays"
    worker = after.runtime.workers[0]
    assert not worker.executor.playback.heard and worker.slack.in_flight_s == pytest.approx(0.0)


def test_images_that_come_at_once_wait_for_each_other_in_small_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step holds no more tokens than the largest captured bucket of prompts, here one image or three."""
    waits = []
    for tokens in (512, 2048):
        limits = StepLimits(prompt_tokens=tokens, prompts=tokens // 64)
        monkeypatch.setattr(ModelRunner, "limits", limits)
        waits.append(run(tmp_path, yields=True, spread_s=0.0).first_sound[CLIENTS])
    assert waits[1] < 0.7 * waits[0], waits


def test_loads_without_sound_run_the_same_steps_at_the_same_times(tmp_path: Path) -> None:
    before, after = (run(tmp_path, yields=yields, each=1, outputs=("text",)) for yields in (False, True))
    assert before.device.steps == after.device.steps and len(after.device.steps) > 50


def test_other_ranks_learn_what_clients_have_not_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vision and talker are on rank 0, thinker and codec on rank 1, which makes the sound."""
    came: list[Playing] = []
    take = Executor.playing
    monkeypatch.setattr(Executor, "playing", lambda self, message: (came.append(message), take(self, message))[1])
    load = run(tmp_path, yields=True, each=1, ranks=2)
    ahead = [seconds for message in came for seconds in message.ahead_s]
    assert max(ahead) > 8 * FRAME_S and ahead.count(-1.0) == CLIENTS
    assert all(not worker.executor.playback.heard for worker in load.runtime.workers)


def sound_of(playback: Playback, handle: int, values: int, *, is_heard: bool = True) -> Sound:
    sound = Sound()
    playback.sent(Handle(handle), sound, values, is_heard=is_heard)
    return sound


def test_slack_is_what_the_next_piece_leaves_of_the_buffered_sound() -> None:
    clock = FakeClock(10.0)
    playback = Playback(rate=100.0, clock=clock)
    assert playback.least_s() == math.inf
    sound = sound_of(playback, 1, 50)
    sound_of(playback, 2, 300)
    assert playback.least_s() == pytest.approx(0.5)
    sound.done_at = 10.2  # another rank makes the next piece by then
    assert playback.least_s() == pytest.approx(0.3)
    clock.now = 10.4
    assert playback.least_s() == pytest.approx(0.1)
    clock.now = 10.7
    playback.sent(Handle(1), sound, 50, is_heard=True)
    assert playback.underruns == 1 and sound.dry_at == pytest.approx(11.2), "playback goes on when sound comes"
    playback.ended(Handle(1))
    assert playback.least_s() == pytest.approx(2.3)
    clock.now = 14.5
    assert playback.least_s() == math.inf, "a stall of more than a second has another cause"


def test_sound_for_a_file_has_no_listener() -> None:
    playback = Playback(rate=100.0, clock=FakeClock(10.0))
    sound = sound_of(playback, 1, 50, is_heard=False)
    assert playback.least_s() == math.inf and sound.dry_at == pytest.approx(10.5)


def test_a_new_prompt_is_cut_to_the_time_that_listeners_leave() -> None:
    """A step takes the tokens that fit, and none if they are too few for a launch. After a second it runs anyway."""
    node = FakeNode(budget=200, pages=256, most_tokens=300)
    launch = node.device.launch

    def timed(plan: StepPlan) -> StepOutput:
        node.now += 0.001 * sum(one.count for one in plan.passes)
        return launch(plan)

    node.device.launch = timed  # type: ignore[method-assign]
    left = [math.inf]
    node.scheduler.yield_to(slack := Slack(lambda: left[0]))

    def counts() -> list[int]:
        found = [one.count for plan in node.launch() for one in plan.passes]
        if found:
            node.collect()
        return found

    for handle in range(2):
        node.open(handle, 250)
    node.prefill(0, [handle % 7 for handle in range(150)], yields=True)
    assert counts() == [150] and not slack.is_holding
    node.prefill(0, [3, 4, 5, 6], yields=False)
    node.prefill(1, [handle % 5 for handle in range(240)], yields=True)
    left[0] = MARGIN_S + 0.1001
    assert counts() == [4, 100] and slack.is_holding and slack.in_flight_s == pytest.approx(0.0)
    left[0] = MARGIN_S + 0.030
    assert counts() == []
    node.now += HOLD_LIMIT_S + 0.1
    assert counts() == [140]


@dataclass
class Moment:
    """A mark that passes when the device gets there."""

    at: float
    is_passed: bool = False

    def seconds_until(self, later: Moment) -> float:
        return later.at - self.at


def test_work_counts_as_in_flight_until_the_device_has_finished_it() -> None:
    """Its outputs may have been handed to other nodes of the device long before."""
    cost, slack = StepCost(), Slack(lambda: 1.0)
    slack.costs.append(cost)
    first, second = Moment(0.2), Moment(0.7)
    cost.begin(Moment(0.0, is_passed=True), 100, 100).end = first
    first.is_passed = True
    assert slack.left_s() == pytest.approx(1.0 - MARGIN_S) and cost.of(50) == pytest.approx(0.1)
    work = cost.begin(Moment(0.2, is_passed=True), 100, 50)
    assert slack.in_flight_s == pytest.approx(0.1), "while it is launched"
    work.end = second
    assert slack.left_s() == pytest.approx(0.9 - MARGIN_S)
    second.is_passed = True
    assert slack.in_flight_s == 0 and cost.of(100) > 0.2


def test_an_encoder_waits_for_listeners_but_not_for_ever() -> None:
    clock = FakeClock(10.0)
    engine = StatelessEngine(
        VISION, Vision(Device(clock)), device=torch.device("cpu"), dtype=torch.float32, clock=clock
    )
    left = [math.inf]
    engine.yield_to(slack := Slack(lambda: left[0]))

    def submit(handle: int) -> None:
        engine.open(Handle(handle), SamplingParams(), 0)
        inputs = {"pixels": torch.zeros(8)}
        engine.submit(Job(key=JobKey(handle), handle=Handle(handle), inputs=inputs, outputs=("embeds",), yields=True))

    def launched() -> int:
        step = engine.launch()
        return 0 if step is None else len(engine.collect(step).done)

    submit(1)
    assert launched() == 1 and not slack.is_holding, "8 ms"
    left[0] = MARGIN_S + 0.020
    for handle in range(2, 6):
        submit(handle)
    assert launched() == 2 and slack.is_holding and slack.in_flight_s == pytest.approx(0.0)
    left[0] = 0.0
    assert launched() == 0
    clock.sleep(HOLD_LIMIT_S + 0.1)
    assert launched() == 1 and launched() == 1 and launched() == 0
