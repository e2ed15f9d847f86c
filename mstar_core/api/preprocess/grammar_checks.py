"""Checks of grammars before their requests are accepted, in processes that are killed if the compiler takes too long.

The engine compiles a grammar within its worker, so it must receive none that stalls.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import Final

from mstar_core.api.preprocess.pool import Pool
from mstar_core.api.preprocess.process import MakeProcess, ProcessorProcess
from mstar_core.errors import BadMedia

CHECKER: Final = "mstar_core.constraints.checker:GrammarChecker"
CHECK_S: Final = 30.0
"""Longest check on a busy machine. The checker ends its process sooner, by CPU time."""

CHECKERS: Final = 2
"""Processes, so that others go on beside a form that takes all of its time."""

REMEMBERED: Final = 1024
"""Results kept. Most clients send the same schema with every request."""

TOO_SLOW: Final = "the compiler did not finish in time"


class GrammarChecks:
    """The processes that check, started by the first grammar, and their latest results. Owned by the service."""

    def __init__(self, *, make: MakeProcess = ProcessorProcess) -> None:
        self._make = make
        self._start: asyncio.Task[Pool] | None = None
        self._problems: OrderedDict[bytes, str] = OrderedDict()

    async def problem(self, constraint: str) -> str:
        """Return why a grammar cannot hold an answer; empty if it can. Raises StartError, Unavailable."""
        key = hashlib.blake2b(constraint.encode(), digest_size=16).digest()
        if key in self._problems:
            self._problems.move_to_end(key)
            return self._problems[key]
        if self._start is None or (self._start.done() and self._start.exception() is not None):
            self._start = asyncio.create_task(self._started())
        pool = await asyncio.shield(self._start)  # a caller that goes away does not end the start
        try:
            problem = await pool.problem(constraint)
        except BadMedia:
            problem = TOO_SLOW
        self._problems[key] = problem
        while len(self._problems) > REMEMBERED:
            self._problems.popitem(last=False)
        return problem

    async def _started(self) -> Pool:
        pool = Pool(CHECKER, None, {}, size=CHECKERS, job_s=CHECK_S, make=self._make)
        try:
            await pool.start()
        except BaseException:
            await pool.close()
            raise
        return pool

    async def close(self) -> None:
        """End the processes. Safe to call twice."""
        start, self._start = self._start, None
        if start is None:
            return
        if not start.done():
            start.cancel()
        (pool,) = await asyncio.gather(start, return_exceptions=True)
        if isinstance(pool, Pool):
            await pool.close()
