"""Steps are gone through without their kernels where that is allowed, and nowhere else. A stand-in plays triton."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import ModuleType, TracebackType
from typing import Any

import pytest

from mstar_core.engine.compiling import ahead, blindly


class Kernel:
    """Triton's function: what is compiled is not compiled again, and a launch without `warmup` runs."""

    mode: Mode | None = None

    def __init__(self) -> None:
        self.by: list[str] = []
        self.runs = 0

    def run(self, *args: object, warmup: bool, **given: object) -> None:
        if not self.by and Kernel.mode is not None:
            self.by.append("")
            Kernel.mode.submit(self.compile)
        if not warmup:
            self.runs += 1

    def compile(self) -> None:
        self.by = [threading.current_thread().name]

    def launch(self) -> None:
        self.run(1, grid=(1,), warmup=False)


class Mode:
    """Triton's AsyncCompileMode."""

    def __init__(self, executor: Executor, *, ignore_errors: bool) -> None:
        self.executor, self.futures = executor, list[Future[None]]()

    def submit(self, work: Callable[[], None]) -> None:
        self.futures.append(self.executor.submit(work))

    def __enter__(self) -> None:
        Kernel.mode = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        Kernel.mode = None
        for each in self.futures:
            each.result()


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    top: Any = ModuleType("triton")
    top.AsyncCompileMode = Mode
    jit: Any = ModuleType("triton.runtime.jit")
    jit.JITFunction = Kernel
    for name, module in (
        ("triton", top),
        ("triton.runtime", ModuleType("triton.runtime")),
        ("triton.runtime.jit", jit),
    ):
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("triton")
def test_kernels_of_a_blind_step_are_compiled_by_threads_and_do_not_run() -> None:
    kernels, run = [Kernel() for _ in range(3)], Kernel.run

    def step() -> None:
        for each in [*kernels, *kernels]:
            each.launch()

    with blindly(True):
        ahead(step)
    assert all(each.by and each.by[0].startswith("compile") and each.runs == 0 for each in kernels)
    assert Kernel.run is run
    kernels[0].launch()
    assert kernels[0].runs == 1


@pytest.mark.usefixtures("triton")
def test_a_step_that_fails_blindly_leaves_everything_as_it_was() -> None:
    kernel, run = Kernel(), Kernel.run

    def step() -> None:
        kernel.launch()
        raise ValueError("numbers without a meaning")

    with blindly(True):
        ahead(step)
    assert kernel.by and kernel.runs == 0 and Kernel.run is run and Kernel.mode is None


@pytest.mark.usefixtures("triton")
def test_a_step_that_must_see_its_numbers_is_not_gone_through() -> None:
    kernel = Kernel()
    ahead(kernel.launch)
    with blindly(True), blindly(False):
        ahead(kernel.launch)
    assert not kernel.by and kernel.runs == 0


def test_without_triton_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    steps: list[int] = []
    with blindly(True):
        ahead(lambda: steps.append(1))
    assert not steps
