"""Pool processes reused by several apis, because starting one takes longer than the rest of a test.

Killed and dead processes are not reused. The remaining ones end with the interpreter.
"""

from __future__ import annotations

import atexit
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

from mstar_core.api.preprocess.pipe import PoolPipe
from mstar_core.api.preprocess.process import ProcessorProcess

KEPT: Final[dict[str, list[tuple[SpawnProcess, PoolPipe, bool, bool]]]] = defaultdict(list)
"""Idle processes by their arguments."""

STARTER: Final = ThreadPoolExecutor(1, thread_name_prefix="kept-pool")
"""Starts all processes: a process ends with the thread that started it, and a pool's threads end with the pool."""


class KeptProcess(ProcessorProcess):
    """Like the real process, but `stop` keeps a working process, and `start` takes a kept one."""

    def __init__(self, target: str, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        super().__init__(target, folder, model_kwargs)
        self._kept = KEPT[repr((target, folder, sorted(model_kwargs.items())))]
        self._was_killed = False

    def start(self) -> None:
        while self._kept:
            process, pipe, self.is_inline, self.is_parallel = self._kept.pop()
            if process.is_alive():
                self._process, self._pipe, self.jobs = process, pipe, 0
                return
            pipe.close()
        STARTER.submit(super().start).result()

    def kill(self) -> None:
        self._was_killed = True
        super().kill()

    def stop(self) -> None:
        process, pipe = self._process, self._pipe
        if process is not None and pipe is not None and process.is_alive() and not self._was_killed and not pipe.poll():
            self._kept.append((process, pipe, self.is_inline, self.is_parallel))
            self._process = self._pipe = None
            return
        super().stop()
        self._was_killed = False


@atexit.register
def end_kept() -> None:
    """End the idle processes and close their pipes, which the interpreter would report as not closed."""
    for kept in KEPT.values():
        while kept:
            process, pipe, _, _ = kept.pop()
            process.kill()
            pipe.close()
