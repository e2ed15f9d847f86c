"""Sleep of a rank's nodes: orders, refusals, progress, and steps that wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from mstar_core.engine.base import Handle, Job, JobKey
from mstar_core.engine.memory.cpu import CpuSleeper
from mstar_core.engine.memory.node_memory import NodeMemory
from mstar_core.engine.memory.placed import PlacedSleeper
from mstar_core.errors import EngineError
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.messages.sleep import Sleep, SleepDone, SleepProgress, Wake, WakeWanted
from mstar_core.worker.start.sleep import sleeper_of
from mstar_core.worker.state.sleep import RankSleep
from mstar_core.worker.steps import FairShare, Steps
from tests.fakes.runner import FakeRunner

LIMIT_S = 60.0


def layer(value: float = 3.0) -> nn.Module:
    module = nn.Linear(8, 8, bias=False)
    nn.init.constant_(module.weight, value)
    return module.requires_grad_(False)


class SleepyRunner(FakeRunner):
    """A fake runner with weights. slept: number of its sleeps."""

    slept = 0

    def node_memory(self) -> NodeMemory:
        return NodeMemory(module=self.module)

    def sleeps(self) -> None:
        self.slept += 1


class Rank:
    """Two nodes, `a` and `b`, with their sleep. answers: sent to the supervisor. value: of the files' weights."""

    def __init__(self, value: float = 3.0) -> None:
        self.runners = {name: SleepyRunner(name, lambda job: {}) for name in ("a", "b")}
        for runner in self.runners.values():
            runner.module = layer()
        self.steps = Steps(runners=self.runners, scheduler=FairShare(self.runners))
        self.answers: list[Any] = []
        self.value = value
        sleeper = CpuSleeper(torch.device("cpu"))
        for name, runner in self.runners.items():
            sleeper.hold(name, runner.node_memory())
        self.sleep = RankSleep(
            runners=self.runners, steps=self.steps, sleeper=sleeper, load=self.load, answer=self.answers.append
        )

    def load(self, names: Collection[str], progress: Callable[[int, int], object]) -> Mapping[str, nn.Module]:
        progress(256, 512)
        return {name: layer(self.value) for name in names}

    def order(self, message: Sleep | Wake, busy: tuple[int, ...] = ()) -> SleepDone:
        self.sleep.begin(message, lambda names: list(busy))
        deadline = time.monotonic() + LIMIT_S
        while self.sleep.is_working and time.monotonic() < deadline:
            self.sleep.turn()
            time.sleep(0.001)
        answer = self.answers.pop()
        assert isinstance(answer, SleepDone) and answer.number == message.number
        return answer

    def weight(self, name: str) -> torch.Tensor:
        return next(self.runners[name].module.parameters())

    def submit(self, name: str) -> None:
        self.runners[name].open(Handle(1), SamplingParams(), 8)
        self.runners[name].submit(Job(key=JobKey(1), handle=Handle(1)))


@pytest.mark.parametrize("level", [1, 2])
def test_a_node_sleeps_and_wakes_with_its_weights(level: int) -> None:
    rank = Rank()
    assert rank.order(Sleep(number=1, level=level, nodes=["a"])) == SleepDone(
        number=1, asleep={"a": level}, freed=256, kept=256 if level == 1 else 0
    )
    assert (rank.weight("a").untyped_storage().nbytes(), rank.weight("b").untyped_storage().nbytes()) == (0, 256)
    assert rank.runners["a"].slept == 1 and rank.steps.asleep == {"a"}
    rank.submit("a")
    assert rank.steps.launch() == []
    assert rank.order(Wake(number=2, nodes=["a"])) == SleepDone(number=2, freed=256)
    assert (rank.weight("a") == 3).all()
    assert rank.steps.launch() == ["a"]
    rank.sleep.close()


def test_weights_of_level_2_come_from_the_files() -> None:
    rank = Rank(value=5.0)
    rank.order(Sleep(number=1, level=2))
    rank.answers.clear()
    rank.sleep.begin(Wake(number=2), lambda names: [])
    assert rank.steps.is_held  # nothing runs while modules are loaded
    while rank.sleep.is_working:
        rank.sleep.turn()
    assert (rank.weight("a") == 5).all() and (rank.weight("b") == 5).all()
    assert not rank.steps.is_held
    assert SleepProgress(number=2, done=256, total=512) in rank.answers
    rank.sleep.close()


def test_requests_in_use_refuse_and_nothing_changes() -> None:
    rank = Rank()
    assert rank.order(Sleep(number=1), busy=(7, 9)) == SleepDone(number=1, busy=[7, 9])
    assert not rank.sleep.asleep and not rank.steps.asleep and rank.weight("a").untyped_storage().nbytes()


def test_work_of_a_sleeping_node_is_reported_once() -> None:
    rank = Rank()
    rank.order(Sleep(number=1))
    rank.sleep.want()
    assert not rank.answers
    rank.submit("b")
    for _ in range(2):
        rank.sleep.want()
    assert rank.answers == [WakeWanted(nodes=["b"])]
    rank.sleep.close()


def test_an_order_of_what_is_done_already_is_answered_at_once() -> None:
    rank = Rank()
    assert rank.order(Wake(number=1)) == SleepDone(number=1)
    assert rank.order(Sleep(number=2, nodes=["elsewhere"])) == SleepDone(number=2)
    first = rank.order(Sleep(number=3))
    assert (first.is_whole, first.freed) == (True, 512)
    assert rank.order(Sleep(number=4)) == msgspec.structs.replace(first, number=4, freed=0)
    deeper = rank.order(Sleep(number=5, level=2))
    assert (deeper.asleep, deeper.freed, deeper.kept) == ({"a": 2, "b": 2}, 0, 0)
    rank.sleep.close()


def test_a_wake_that_fails_ends_the_process_with_the_cause() -> None:
    rank = Rank()
    rank.order(Sleep(number=1, level=2))
    rank.sleep.load = lambda names, progress: {name: nn.Linear(3, 3, bias=False) for name in names}
    with pytest.raises(EngineError, match="differ from those before the sleep"):
        rank.order(Wake(number=2))
    rank.sleep.close()


@pytest.mark.parametrize("keeps", [False, True])
def test_the_weights_of_a_gpu_keep_their_copy_only_if_the_key_says_so(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mstar_core.worker.start.sleep.DriverMemory", lambda _: SimpleNamespace(granularity=1))
    spec: Any = SimpleNamespace(sleepable=True, sleep_copies=keeps)
    sleeper = sleeper_of(torch.device("cuda", 0), spec)
    assert isinstance(sleeper, PlacedSleeper) and sleeper.keeps_copies is keeps


def test_a_gpu_rank_sleeps_only_if_its_memory_was_placed_for_that() -> None:
    never: Any = SimpleNamespace(sleepable=False)
    assert sleeper_of(torch.device("cuda", 0), never) is None
    assert isinstance(sleeper_of(torch.device("cpu"), never), CpuSleeper)
    rank = Rank()
    rank.sleep.sleeper, rank.sleep.why_not, rank.sleep.hint = None, "it cannot", "sleepable: true"
    assert rank.order(Sleep(number=1)) == SleepDone(number=1, title="it cannot", hint="sleepable: true")
    assert not rank.sleep.asleep
