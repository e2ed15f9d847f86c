"""Kernels of steps that are gone through are compiled and do not run. A stand-in plays triton."""

from __future__ import annotations

import threading

import pytest
import torch

from mstar_core.engine.cuda_graphs.cache import GraphCache, StaticStep
from mstar_core.engine.cuda_graphs.compilation import (
    Compiling,
    _known_once_queued,
    apart,
    compile_in_parallel,
    compiling_only,
    zero_filled,
)
from tests.fakes import jit
from tests.fakes.jit import Disk, JITFunction


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return jit.installed(monkeypatch)


def gone_through(kernels: list[JITFunction], times: int = 2) -> Compiling:
    """Launch all of them, some times over, where they do not run."""
    found: list[Compiling] = []

    def go() -> None:
        with compiling_only() as compiling:
            found.append(compiling)
            for _ in range(times):
                for kernel in kernels:
                    kernel.launch(1)

    apart(go)
    return found[0]


def test_kernels_that_are_missing_are_compiled_by_threads_with_what_launches_them(disk: Disk) -> None:
    kernels, run = [JITFunction(name) for name in "abc"], JITFunction.run
    assert gone_through(kernels).has_missed
    by = [kernel.known[kernel.name, 1].by for kernel in kernels]
    assert by[0] == threading.current_thread().name and all(name.startswith("compile") for name in by[1:])
    assert all(disk.launchers[kernel.name, 1].startswith("compile") for kernel in kernels)
    assert not any(kernel.runs for kernel in kernels)
    assert JITFunction.run is run and jit.active.get() is None and JITFunction.knobs.compilation.listener is None
    kernels[2].launch(1)
    kernels[2].launch(2)
    assert kernels[2].runs == [("c", 1), ("c", 2)]


def test_nothing_waits_where_the_cache_has_all(disk: Disk) -> None:
    gone_through([JITFunction("a"), JITFunction("b")])
    disk.launchers.clear()
    again = [JITFunction("a"), JITFunction("b")]
    found = gone_through(again)
    assert not found.has_missed and found.count == 0 and not disk.launchers
    assert [kernel.known[kernel.name, 1].by for kernel in again] == ["cache", "cache"]


def test_a_kernel_that_does_not_compile_is_named_and_left_to_its_launch(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.broken.add(("b", 1))
    kernels = [JITFunction(name) for name in "abc"]
    gone_through(kernels)
    assert "kernel b was not compiled ahead: RuntimeError: ('b', 1) does not compile" in caplog.text
    assert [list(kernel.known) for kernel in kernels] == [[("a", 1)], [], [("c", 1)]]
    with pytest.raises(RuntimeError, match="does not compile"):
        kernels[1].launch(1)


def test_what_was_noted_is_compiled_where_the_block_raises(disk: Disk) -> None:
    kernels, run = [JITFunction(name) for name in "ab"], JITFunction.run

    def go() -> None:
        with compiling_only():
            for kernel in kernels:
                kernel.launch(1)
            raise ValueError("numbers without a meaning")

    with pytest.raises(ValueError, match="meaning"):
        apart(go)
    assert all(kernel.known for kernel in kernels) and not any(kernel.runs for kernel in kernels)
    assert JITFunction.run is run and jit.active.get() is None and JITFunction.knobs.compilation.listener is None


def test_kernels_of_other_threads_run(disk: Disk) -> None:
    mine, other = JITFunction("mine"), JITFunction("other")

    def go() -> None:
        with compiling_only():
            mine.launch(1)
            thread = threading.Thread(target=other.launch, args=(1,))
            thread.start()
            thread.join()

    apart(go)
    assert other.runs == [("other", 1)] and not mine.runs


def test_a_launcher_that_is_not_built_is_left_to_the_launch(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(src: object, metadata: object) -> None:
        raise OSError("no C compiler")

    import triton.runtime.driver as driver

    monkeypatch.setattr(driver.driver.active, "launcher_cls", fails)
    kernels = [JITFunction(name) for name in "ab"]
    gone_through(kernels)
    assert all(kernel.known for kernel in kernels)


def test_steps_are_compiled_without_running_and_their_tensors_are_zero(disk: Disk) -> None:
    kernels, made = [JITFunction(name) for name in "ab"], list[torch.Tensor]()

    def steps(_: Compiling) -> None:
        for kernel in kernels:
            kernel.launch(1)
        with zero_filled():
            made.extend([torch.empty(64), torch.full((4,), 7.0).new_empty(64), torch.empty_like(torch.ones(4))])

    compile_in_parallel(steps, "steps")
    assert all(kernel.known and not kernel.runs for kernel in kernels)
    assert all(not tensor.any() for tensor in made)


def test_steps_that_cannot_be_traced_are_reported_and_left_to_their_launch(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    def steps(_: Compiling) -> None:
        raise RuntimeError("no trace")

    compile_in_parallel(steps, "steps")
    assert "kernels are compiled one by one (steps): RuntimeError: no trace" in caplog.text


def test_a_trace_ends_after_the_first_and_the_last_step_where_the_cache_has_its_kernels(disk: Disk) -> None:
    """A later start must not build and trace every size."""

    def traced() -> list[tuple[int, ...]]:
        cache, kernel, seen = GraphCache(torch.device("cpu")), JITFunction("a"), list[tuple[int, ...]]()

        class Step(StaticStep[None]):
            def forward(self) -> None:
                kernel.launch(1)

        def build(size: tuple[int, ...]) -> Step:
            seen.append(size)
            return Step()

        cache.buckets(build, str).plan([(1,), (2,), (3,)])
        compile_in_parallel(lambda found: cache.warm_up(lambda: not found.has_missed), "steps")
        return seen

    assert traced() == [(1,), (3,), (2,)]
    assert traced() == [(1,), (3,)]


def test_a_kernel_is_queued_once_however_often_it_is_launched() -> None:
    class Queued:
        def result(self) -> None: ...

    class Kernels:
        def __init__(self) -> None:
            self.device_caches = {0: ({}, "target")}
            self.queued: list[str] = []

        def _do_compile(self, key: str, signature: str, device: int, *options: object) -> object:
            self.queued.append(key)
            return Queued() if key != "ready" else key

        def run(self, key: str) -> object:
            known = self.device_caches[0][0]
            return known[key] if key in known else self._do_compile(key, "signature", 0)

    kernel, plain = Kernels(), Kernels._do_compile
    known = kernel.device_caches[0][0]
    with _known_once_queued(Kernels):
        made = [kernel.run(key) for key in ("a", "b", "a", "b", "ready", "ready")]
        assert kernel.queued == ["a", "b", "ready", "ready"] and made[0] is made[2]
        known["a"] = "compiled"  # as Triton does at the end
    assert known == {"a": "compiled"}, "the other did not compile, and its launch reports the error"
    assert Kernels._do_compile is plain
    with _known_once_queued(object):
        pass
