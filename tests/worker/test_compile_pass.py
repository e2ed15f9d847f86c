"""The compile pass of a rank: the kernels of all nodes, before the first capture, each of them once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from mstar_core.engine.base import Handle
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.cuda_graphs.compilation import SWITCH, Compiling
from mstar_core.engine.cuda_graphs.kernel_log import KernelLog
from mstar_core.layers.linear import PreparedLayer
from mstar_core.worker.start.compile_pass import TracedNode, compile_rank
from tests.engine.recorded import RecordingCache
from tests.engine.tiny_engine import LM, Driver, TinyLM, make_engine
from tests.fakes import jit
from tests.fakes.jit import Disk, JITFunction
from tests.fakes.runner import FakeRunner

SIZES = CaptureSizes(decode=(1, 4), decode_later=(2,))


class Codec(nn.Module):
    """A module that traces its own steps: kernels of two sizes, then what `work` does."""

    def __init__(self, work: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.kernel = JITFunction("codec")
        self.work = work

    def trace(self, compiling: Compiling) -> None:
        for size in (1, 8):
            self.kernel.launch(size)
        self.work()


class Experts(PreparedLayer):
    """A layer that traces kernels of two sizes."""

    def __init__(self, size: str) -> None:
        super().__init__()
        self.size = size
        self.kernel = JITFunction(size)

    @property
    def traced_as(self) -> str:
        return self.size

    def trace(self) -> None:
        for size in (1, 8):
            self.kernel.launch(size)


class Rank:
    """A rank with a language model and a codec. events: compilations and captures, in order."""

    def __init__(self, codec: Codec | None = None) -> None:
        self.events: list[str] = []
        self.kernel = JITFunction("language")
        module = TinyLM()
        module.register_forward_pre_hook(self._launch, with_kwargs=True)
        self.graphs = RecordingCache()
        self.engine = make_engine(
            module=module,
            graphs=SIZES,
            captures=self.graphs,
            is_captured=False,
            report=lambda phase, step: self.events.append(phase),
        )
        self.codec = codec or Codec()
        runner = FakeRunner("codec", lambda job: {}, lambda handle: [])
        self.nodes = [
            TracedNode(spec=LM, runner=self.engine, module=module),
            TracedNode(spec=LM, runner=runner, module=self.codec),
        ]

    def _launch(self, module: nn.Module, args: object, given: dict[str, Any]) -> None:
        self.kernel.launch(len(given["positions"]))

    def compile(self, walks: Callable[[], None] = lambda: None) -> list[tuple[int, int]]:
        told: list[tuple[int, int]] = []
        compile_rank(self.nodes, walks, lambda done, total: told.append((done, total)))
        return told


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setenv(SWITCH, "threads")  # the fake's disk is in memory, which a forked process has a copy of
    return jit.installed(monkeypatch)


def test_all_kernels_are_compiled_before_the_first_capture_and_none_twice(disk: Disk) -> None:
    rank, sampled = Rank(), JITFunction("sampled")
    rank.compile(lambda: sampled.launch(3))
    assert not rank.graphs.graphs and not rank.kernel.runs
    compiled = set(disk.kernels)
    assert {("codec", 1), ("codec", 8), ("language", 1), ("language", 2), ("language", 4), ("sampled", 3)} <= compiled
    seen: list[object] = []
    JITFunction.knobs.compilation.listener = lambda **told: seen.append(told["src"])
    rank.engine.capture()
    sampled.launch(3)
    assert rank.graphs.graphs and not seen and disk.kernels == compiled, "captures found everything compiled"


def test_parts_of_a_module_trace_the_kernels_of_every_size_once_for_each_kind(disk: Disk) -> None:
    layers = [Experts("wide"), Experts("wide"), Experts("narrow")]
    whole = Codec()
    whole.layers = nn.ModuleList(layers)
    Rank(whole).compile()
    assert {(name, size) for name in ("codec", "wide", "narrow") for size in (1, 8)} <= set(disk.kernels)
    assert [len(layer.kernel.known) for layer in layers] == [2, 0, 2]


def test_a_later_start_traces_two_steps_of_a_node_and_no_samples(disk: Disk) -> None:
    Rank().compile()
    again, walks = Rank(), list[str]()
    again.compile(lambda: walks.append("samples"))
    assert sorted(again.kernel.known) == [("language", 1), ("language", 4)] and not walks


def test_a_node_that_cannot_be_traced_is_named_and_the_others_are_compiled(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no trace")

    rank = Rank(Codec(fail))
    rank.compile(fail)
    assert "kernels of LM are compiled one by one: RuntimeError: no trace" in caplog.text
    assert "kernels of the samples are compiled one by one" in caplog.text
    assert ("language", 4) in disk.kernels and ("codec", 8) in disk.kernels


def test_a_trace_leaves_no_prefix_and_no_count(disk: Disk) -> None:
    rank = Rank()

    def prompt() -> None:
        driver = Driver(rank.engine)
        driver.open(1)
        driver.prefill(1, list(range(12)))
        driver.run()
        assert rank.engine.memory().pages_used == 3
        rank.engine.close(Handle(1))
        assert rank.engine.memory().pages_cached == 3

    before = rank.engine.counters()
    rank.compile(prompt)
    memory = rank.engine.memory()
    assert memory.pages_cached == 0 and rank.engine.counters() == before


def test_kernels_are_counted_by_when_they_were_compiled(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    log, rank, kernel = KernelLog(), Rank(), JITFunction("other")
    log.listen()
    with log.compiling_ahead():
        rank.compile()
    kernel.launch(1)
    log.serve()
    kernel.launch(1)
    kernel.launch(2)
    kernel.launch(2)
    ahead = len(disk.kernels) - 2
    assert log.counters() == {"kernels_ahead": ahead, "kernels_missed": 1, "kernels_late": 1}
    assert "kernel ('other', 2) was compiled while serving" in caplog.text
