"""Compiles the Triton kernels of a step by several threads at once, before it runs. Used by rehearsals and captures.

A kernel is compiled when it is first launched, one after the other: of the first start on a machine that was most of
the time. Here a step is gone through once without running its kernels, which are handed to threads instead.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Final

log = logging.getLogger(__name__)

THREADS: Final = 8
"""The compiler holds the interpreter for about a fifth of its time; its assembler is a process of its own."""

_allowed: ContextVar[bool] = ContextVar("mstar_compiles_ahead", default=False)


@contextlib.contextmanager
def blindly(is_allowed: bool) -> Iterator[None]:
    """Inside, `ahead` may go through steps whose numbers are whatever memory held."""
    token = _allowed.set(is_allowed)
    try:
        yield
    finally:
        _allowed.reset(token)


def ahead(step: Callable[[], object]) -> None:
    """Compile what a step launches, where `blindly` allows it. All else that it computes is meaningless.

    It never raises: whatever is wrong with the step shows when it runs.
    """
    if not _allowed.get():
        return
    try:
        with compiled_only():
            step()
    except Exception:  # the step itself comes next, and says so in its own words
        log.debug("a step was not compiled ahead", exc_info=True)


@contextlib.contextmanager
def compiled_only() -> Iterator[None]:
    """Triton kernels launched inside are compiled by threads and do not run; at the end all are ready to."""
    import triton
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compiled(kernel: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> Any:
        return run(kernel, *args, warmup=True, **kwargs)

    with ThreadPoolExecutor(THREADS, "compile") as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        JITFunction.run = compiled
        try:
            yield
        finally:
            JITFunction.run = run
