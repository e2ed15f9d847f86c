"""Fake triton: kernels that record compilation and launches, a disk cache, and asynchronous compilation.

`installed` replaces triton by it. It follows the rules of triton 3.6: a launch compiles a variant that is new for its
arguments, or submits it to the active mode; the listener is called for each; with `warmup` a kernel does not run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, as_completed
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

import pytest

Key = tuple[object, ...]


class Disk:
    """Fake disk cache. broken: keys that do not compile. launchers: the compiled keys, each with its thread."""

    def __init__(self) -> None:
        self.kernels: set[Key] = set()
        self.launchers: dict[Key, str] = {}
        self.broken: set[Key] = set()


class Compiled:
    """A compiled kernel. by: the thread that compiled it, or `cache` if it was on disk."""

    def __init__(self, key: Key, by: str) -> None:
        self.src, self.metadata, self.by = SimpleNamespace(key=key), None, by


class Mode:
    """Fake of triton's AsyncCompileMode."""

    def __init__(self, executor: Executor, *, ignore_errors: bool = False) -> None:
        self.executor, self.ignore_errors = executor, ignore_errors
        self.waiting: dict[Key, tuple[Future[Compiled], Callable[[Compiled], None]]] = {}

    def submit(self, key: Key, work: Callable[[], Compiled], finish: Callable[[Compiled], None]) -> None:
        if key not in self.waiting:
            self.waiting[key] = self.executor.submit(work), finish

    def __enter__(self) -> Mode:
        if active.get() is not None:
            raise RuntimeError("Another AsyncCompileMode is already active")
        active.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        list(as_completed([future for future, _ in self.waiting.values()], timeout=10))
        for future, finish in self.waiting.values():
            if future.exception() is None:
                finish(future.result())
            elif not self.ignore_errors:
                future.result()
        active.set(None)


active: ContextVar[Mode | None] = ContextVar("active", default=None)


class JITFunction:
    """A kernel. known: variants compiled in this process, by arguments; runs: arguments in the order of launches."""

    disk: Disk
    knobs: SimpleNamespace

    def __init__(self, name: str) -> None:
        self.name = self.__name__ = name
        self.known: dict[Key, Compiled] = {}
        self.runs: list[Key] = []

    def launch(self, *args: object) -> None:
        """Launch the kernel as a caller does."""
        self.run(*args, grid=(1,), warmup=False)

    def run(self, *args: object, grid: object, warmup: bool) -> Any:
        key, mode = (self.name, *args), active.get()
        if key not in self.known and mode is not None:
            mode.submit(key, lambda: self._compile(key), lambda made: self.known.update({key: made}))
            return object()  # triton returns a future of the kernel
        if key not in self.known:
            self.known[key] = self._compile(key)
        if not warmup:
            self.runs.append(key)
        return self.known[key]

    def _compile(self, key: Key) -> Compiled:
        if key in self.disk.broken:
            raise RuntimeError(f"{key} does not compile")
        was_there = key in self.disk.kernels
        self.disk.kernels.add(key)
        if self.knobs.compilation.listener is not None:
            self.knobs.compilation.listener(src=key, cache_hit=was_there)
        return Compiled(key, "cache" if was_there else threading.current_thread().name)


def _build(src: SimpleNamespace, metadata: object) -> None:
    JITFunction.disk.launchers[src.key] = threading.current_thread().name


def installed(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Replace triton for a test. Returns the empty disk cache."""
    parts = ("triton", "triton.knobs", "triton.runtime", "triton.runtime.jit", "triton.runtime.driver")
    made: dict[str, Any] = {name: ModuleType(name) for name in parts}
    made["triton"].AsyncCompileMode, made["triton"].knobs = Mode, made["triton.knobs"]
    made["triton.knobs"].compilation = SimpleNamespace(listener=None)
    made["triton.runtime.jit"].JITFunction = JITFunction
    made["triton.runtime.driver"].driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=_build))
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(JITFunction, "disk", Disk(), raising=False)
    monkeypatch.setattr(JITFunction, "knobs", made["triton.knobs"], raising=False)
    return JITFunction.disk
