"""Record of the Triton kernels that a process compiles: ahead of the captures, one by one in a start, or while serving.

Owned by the worker. A kernel that is compiled while the worker serves delays requests and is a defect of the warm-up.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from mstar_core.engine.cuda_graphs.kernel_list import VARIABLE, line_of

log = logging.getLogger(__name__)


class KernelLog:
    """Counts of compiled kernels. Kernels that the cache on disk has do not count.

    ahead: compiled in parallel before the captures. missed: compiled at a launch of the start, one after the other.
    late: compiled while the worker serves.
    """

    def __init__(self) -> None:
        self.ahead = 0
        self.missed = 0
        self.late = 0
        self._is_ahead = False
        self._serves = False

    def listen(self) -> None:
        """Count from now on, and record the kernels if the environment names a list. Does nothing without Triton."""
        try:
            from triton import knobs
        except ImportError:
            return
        before: Callable[..., None] | None = getattr(knobs.compilation, "listener", None)

        path = os.environ.get(VARIABLE)
        file = open(path, "a", encoding="utf-8") if path else None

        def heard(*args: Any, **told: Any) -> None:
            if file is not None:
                _record(file, told)
            if not told.get("cache_hit", True):
                self.compiled(told.get("src"), told.get("times"))
            if before is not None:
                before(*args, **told)

        knobs.compilation.listener = heard

    @contextmanager
    def compiling_ahead(self) -> Iterator[None]:
        """Count the kernels of the block as compiled ahead."""
        self._is_ahead = True
        try:
            yield
        finally:
            self._is_ahead = False

    def compiled(self, src: object, times: object = None) -> None:
        """Count a compiled kernel. src, times: as Triton's listener gets them."""
        if self._is_ahead:
            self.ahead += 1
            return
        name, took_s = str(getattr(src, "name", src)), getattr(times, "total", 0) / 1e6
        if self._serves:
            self.late += 1
            log.warning("kernel %s was compiled while serving, in %.2f s: the warm-up does not cover it", name, took_s)
        else:
            self.missed += 1
            log.info("kernel %s was compiled at its first launch, in %.2f s", name, took_s)

    def serve(self) -> None:
        """Count all later kernels as late."""
        self._serves = True

    def counters(self) -> dict[str, float]:
        """Return the counts by metric name."""
        return {
            "kernels_ahead": float(self.ahead),
            "kernels_missed": float(self.missed),
            "kernels_late": float(self.late),
        }


def _record(file: TextIO, told: dict[str, Any]) -> None:
    try:
        file.write(line_of(told["src"], dict(told["metadata"])) + "\n")
        file.flush()
    except Exception as error:  # noqa: BLE001 the record of a kernel must not fail its launch
        log.warning("a kernel was not recorded: %s: %s", type(error).__name__, error)
