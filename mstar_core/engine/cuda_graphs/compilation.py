"""Parallel compilation of the Triton kernels of many steps before the first of them runs. Used by the warm-up.

A kernel is compiled at its first launch, one after the other, and then a C compiler builds its launcher; with an empty
cache that is most of a start. Here steps are gone through without running their kernels, which are recorded and then
compiled by forked processes that leave them in the cache on disk. Threads then load them, and compile what is missing.

Cost model: nothing is compiled while steps are gone through, because each torch call releases the GIL and would wait
for every compiling thread. On later starts the first kernels are in the cache on disk: they are loaded, which happens
anyway, `has_missed` stays false, and the caller can stop.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mstar_core.engine.cuda_graphs.forked_work import run_forked

log = logging.getLogger(__name__)

MOST_WORKERS: Final = 32
"""Most processes or threads that compile."""

SWITCH: Final = "MSTAR_COMPILE_AHEAD"
"""Environment variable that turns this off (`0`) or compiles in threads of this process (`threads`)."""

_ATEN: Final = torch.ops.aten
_UNINITIALISED: Final = (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Work that waits for the end. name: of the kernel."""

    name: str
    future: Future[Any]
    work: Callable[[], Any]


class Compiling:
    """Kernels recorded inside `compiling_only`, which makes it.

    has_missed: whether a kernel was not in the cache; from then on all kernels wait for the end. count: those kernels.
    launched: name of the kernel that was launched last. report: called with the compiled kernels and their number.
    """

    def __init__(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        self.has_missed = False
        self.launched = ""
        self._report = report
        self._waiting: list[_Waiting] = []

    @property
    def count(self) -> int:
        """Work that waits for the end."""
        return len(self._waiting)

    def later(self, work: Callable[[], Any]) -> Future[Any]:
        """Queue work of the kernel that was launched last."""
        future: Future[Any] = Future()
        self._waiting.append(_Waiting(self.launched, future, work))
        return future

    def finish(self) -> None:
        """Do the queued work with one process or thread per processor. Errors are logged and left in the futures."""
        # Captured steps, which come last, have the kernels that take longest.
        waiting = self._waiting[::-1]
        self._waiting.clear()
        if not waiting:
            return
        cores = len(os.sched_getaffinity(0))
        if cores > 1 and os.environ.get(SWITCH) != "threads":
            self._fork(waiting, min(MOST_WORKERS, len(waiting), cores))
        with ThreadPoolExecutor(min(MOST_WORKERS, len(waiting), max(2, cores)), "compile") as pool:
            for each in waiting:
                pool.submit(_fulfil, each.future, each.work)
        for each in waiting:
            error = each.future.exception()
            if error is not None:
                text = f"{type(error).__name__}: {error}"
                log.warning("kernel %s was not compiled ahead: %s", each.name, text.splitlines()[0])

    def _fork(self, waiting: list[_Waiting], processes: int) -> None:
        """Leave the kernels in the cache on disk. What fails here is done again by a thread, which has the error."""
        started, total = time.monotonic(), len(waiting)
        work = [each.work for each in waiting]
        took = run_forked(work, processes, lambda done: self._report(done, total), _with_fixed_target())
        longest = sorted(took, key=lambda index: -took[index])[:3]
        names = ", ".join(f"{waiting[index].name} {took[index]:.1f} s" for index in longest)
        log.info(
            "%d of %d kernels compiled by %d processes in %.2f s of %.2f s of work; longest: %s", len(took), total,
            processes, time.monotonic() - started, sum(took.values()), names,
        )  # fmt: skip


class _Queue(Executor):
    """Executor that Triton submits compilations to. The launcher of a kernel is built with it."""

    def __init__(self, compiling: Compiling) -> None:
        self._compiling = compiling

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See Executor: queued for the end."""

        def both() -> T:
            kernel = fn(*args, **kwargs)
            _build_launcher(kernel)
            return kernel

        return self._compiling.later(both)


def prepare_compiler() -> None:
    """Compute what Triton caches at its first kernel: the hash of its own code, and the helper module of its driver.

    Takes about a second, mostly without the GIL. Raises ImportError without Triton.
    """
    from triton.runtime.cache import triton_key
    from triton.runtime.driver import driver

    triton_key()
    driver.active.get_current_target()


def is_wanted() -> bool:
    """Return whether the environment enables parallel compilation."""
    return os.environ.get(SWITCH, "1") != "0"


def apart(work: Callable[[], None]) -> None:
    """Run work in a copy of the context: Triton keeps its compile mode in a context variable."""
    contextvars.copy_context().run(work)


@contextlib.contextmanager
def compiling_only(report: Callable[[int, int], None] = lambda done, total: None) -> Iterator[Compiling]:
    """Compile Triton kernels that this thread launches in the block instead of running them; all are ready at the end.

    The first kernel that the cache lacks is compiled at once and later ones at the end, in parallel, also if the block
    raises. A kernel that fails to compile is logged and left to its first launch. To be used in `apart`.
    report: called with the kernels compiled so far and their number. Raises ImportError or AttributeError if Triton is
    missing or an unknown version.
    """
    import triton
    from triton import knobs
    from triton.runtime.jit import JITFunction

    found, run, heard, owner = Compiling(report), JITFunction.run, knobs.compilation.listener, threading.get_ident()
    mode, waits = triton.AsyncCompileMode(_Queue(found), ignore_errors=True), contextlib.ExitStack()

    def listen(*args: Any, cache_hit: bool, **told: Any) -> None:
        if threading.get_ident() == owner and not cache_hit:
            found.has_missed = True
        if heard is not None:
            heard(*args, cache_hit=cache_hit, **told)

    def compiled(kernel: Any, *args: Any, warmup: bool = False, **given: Any) -> Any:
        if threading.get_ident() != owner:
            return run(kernel, *args, warmup=warmup, **given)
        found.launched = str(getattr(kernel, "__name__", kernel))
        made = run(kernel, *args, warmup=True, **given)
        if found.has_missed and not found.count:
            found.later(lambda: _build_launcher(made))
            waits.enter_context(mode)
        return made

    knobs.compilation.listener, JITFunction.run = listen, compiled
    try:
        yield found
    finally:
        JITFunction.run, knobs.compilation.listener = run, heard
        found.finish()
        waits.close()


def compile_in_parallel(
    trace: Callable[[Compiling], None], what: str, report: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Compile the Triton kernels that `trace` launches in parallel, without running them.

    trace: may return early while `has_missed` is false, as on every later start. what: for the log. report: called with
    the kernels compiled so far and their number. A failure is logged and does not fail the start: each kernel is then
    compiled at its first launch.
    """
    if not is_wanted():
        return

    def run() -> None:
        started = time.monotonic()
        with compiling_only(report) as compiling:
            trace(compiling)
            count, traced_s = compiling.count, time.monotonic() - started
        if count:
            total_s = time.monotonic() - started
            log.info("%s: %d kernels traced in %.2f s, compiled in %.2f s", what, count, traced_s, total_s - traced_s)

    try:
        apart(run)
    except Exception as error:  # noqa: BLE001 an optimisation only
        log.warning("kernels are compiled one by one (%s): %s: %s", what, type(error).__name__, error)


def zero_filled() -> TorchDispatchMode:
    """Return a context in which new tensors are zeros, so that a kernel that did not run still gave valid indices."""
    return _ZeroFilled()  # type: ignore[no-untyped-call]  # untyped in torch


class _ZeroFilled(TorchDispatchMode):
    """Fills new tensors with zeros in place of uninitialised memory."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, which takes a second or two, to turn it off for this mode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func.overloadpacket in _UNINITIALISED else out


def _with_fixed_target() -> Callable[[], None]:
    """Return what a forked process calls before it compiles: the target may no longer be read from the device."""
    try:
        from triton.runtime.driver import driver

        target = driver.active.get_current_target()
    except Exception:
        log.debug("the target of kernels is not known", exc_info=True)
        return lambda: None

    def fix() -> None:
        driver.active.get_current_target = lambda: target

    return fix


def _build_launcher(kernel: Any) -> None:
    """Build the launcher of a kernel, which takes the C compiler a third of a second, and leave it in the cache.

    If this fails, the first launch builds it.
    """
    try:
        from triton.runtime.driver import driver

        driver.active.launcher_cls(kernel.src, kernel.metadata)
    except Exception:  # the first launch does the same and reports the error
        log.debug("a launcher was not built ahead", exc_info=True)


def _fulfil(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 the future passes it on
        future.set_exception(error)
