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
import hashlib
import inspect
import json
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

from mstar_core.engine.cuda_graphs.kernel_list import line_of, source_of
from mstar_core.process.forked_work import ForkedStream, run_forked

log = logging.getLogger(__name__)

MOST_WORKERS: Final = 32
"""Most processes or threads that compile."""

FEW: Final = 3
"""Kernels that threads compile sooner than processes start."""

SWITCH: Final = "MSTAR_COMPILE_AHEAD"
"""Environment variable that turns this off (`0`) or compiles in threads of this process (`threads`)."""

_ATEN: Final = torch.ops.aten
_UNINITIALISED: Final = (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Work that waits for the end. name: of the kernel. number: of its text in the stream, None if it has none."""

    name: str
    future: Future[Any]
    work: Callable[[], Any]
    number: int | None = None


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
        self._stream: ForkedStream | None = None

    @property
    def count(self) -> int:
        """Work that waits for the end."""
        return len(self._waiting)

    def later(self, work: Callable[[], Any], text: str | None = None) -> Future[Any]:
        """Queue work of the kernel that was launched last. text: describes it to the processes that compile already."""
        future: Future[Any] = Future()
        number = None if text is None or self._stream is None else self._stream.put(text)
        self._waiting.append(_Waiting(self.launched, future, work, number))
        return future

    def begin(self) -> None:
        """Start the processes that compile while steps are still traced."""
        if _forks() and (others := _cores() - 1) > 0:
            self._stream = ForkedStream(_compile_text, min(MOST_WORKERS, others), _with_fixed_target())

    def finish(self) -> None:
        """Do the queued work with one process or thread per processor. Errors are logged and left in the futures."""
        started, total = time.monotonic(), len(self._waiting)
        # Captured steps, which come last, have the kernels that take longest.
        waiting = self._waiting[::-1]
        self._waiting.clear()
        took: list[tuple[float, str]] = []
        rest = waiting
        if self._stream is not None:
            early = self._stream.finish(lambda done: self._report(done, total))
            took += [(early[each.number], each.name) for each in waiting if each.number in early]
            rest = [each for each in waiting if each.number not in early]
        if not waiting:
            return
        if len(rest) > FEW and _forks() and _cores() > 1:
            before, work = total - len(rest), [each.work for each in rest]
            found = run_forked(
                work,
                min(MOST_WORKERS, len(rest), _cores()),
                lambda done: self._report(before + done, total),
                _with_fixed_target(),
            )
            took += [(found[index], rest[index].name) for index in found]
        log.info(
            "%d of %d kernels compiled by processes, %d of them during the trace, %.2f s after it; %.2f s of work; "
            "longest: %s",
            len(took),
            total,
            total - len(rest),
            time.monotonic() - started,
            sum(seconds for seconds, _ in took),
            ", ".join(f"{name} {seconds:.1f} s" for seconds, name in sorted(took, reverse=True)[:3]),
        )
        with ThreadPoolExecutor(min(MOST_WORKERS, total, max(2, _cores())), "compile") as pool:
            for each in waiting:
                pool.submit(_fulfil, each.future, each.work)
        for each in waiting:
            error = each.future.exception()
            if error is not None:
                text = f"{type(error).__name__}: {error}"
                log.warning("kernel %s was not compiled ahead: %s", each.name, text.splitlines()[0])


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

        return self._compiling.later(both, _text_of(fn))


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
            found.begin()
            found.later(lambda: _build_launcher(made))
            waits.enter_context(mode)
        return made

    knobs.compilation.listener, JITFunction.run = listen, compiled
    with _known_once_queued(JITFunction):
        try:
            yield found
        finally:
            JITFunction.run, knobs.compilation.listener = run, heard
            found.finish()
            waits.close()


@contextlib.contextmanager
def _known_once_queued(kernels: Any) -> Iterator[None]:
    """Have launches find queued kernels. Triton would compute their keys again at each launch, in half a millisecond.

    kernels: Triton's class of kernels. Those that did not compile are unknown again after the block.
    """
    queue = getattr(kernels, "_do_compile", None)
    if queue is None:  # another version, which is only slower
        yield
        return
    queued: list[tuple[dict[Any, Any], Any, Any]] = []

    def note(kernel: Any, key: Any, signature: Any, device: Any, *args: Any, **given: Any) -> Any:
        made = queue(kernel, key, signature, device, *args, **given)
        if hasattr(made, "result"):
            known = kernel.device_caches[device][0]
            known[key] = made
            queued.append((known, key, made))
        return made

    kernels._do_compile = note
    try:
        yield
    finally:
        kernels._do_compile = queue
        for known, key, made in queued:
            if known.get(key) is made:
                del known[key]


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


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _forks() -> bool:
    return os.environ.get(SWITCH) != "threads"


def _text_of(work: Callable[..., Any]) -> str | None:
    """Describe the kernel that Triton's work compiles, None if this version has another form of work."""
    try:
        from triton.compiler.compiler import get_cache_key, make_backend
    except ImportError:
        return None
    found = inspect.getclosurevars(work).nonlocals
    try:
        source, target, options = found["src"], found["target"], found["options"]
        key = get_cache_key(source, make_backend(target), options, found["env_vars"])
        hashed = hashlib.sha256(key.encode()).hexdigest()
        return line_of(source, {**vars(options), "target": target, "hash": hashed})
    except (KeyError, TypeError, ValueError):
        log.debug("a kernel cannot be described", exc_info=True)
        return None


def _compile_text(text: str) -> None:
    """Compile a described kernel into the cache on disk, with its launcher. Called in a forked process."""
    from triton.compiler import compile as compiled
    from triton.runtime.driver import driver

    entry = json.loads(text)
    source, options = source_of(entry)
    made = compiled(source, target=driver.active.get_current_target(), options=options)
    if made.hash != entry["hash"]:
        raise ValueError(f"{entry['kernel']} is not described exactly")
    _build_launcher(made)


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
