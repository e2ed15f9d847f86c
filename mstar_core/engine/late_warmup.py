"""CUDA graph captures and first runs of a worker that serves already: between steps and in quiet times.

A restarted worker is ready once its weights are loaded, and its steps run uncaptured until their graphs are captured
here. A first start captures some sizes of each step before it is ready; the others follow here.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mstar_core.engine.runner import NodeRunner
from mstar_core.engine.slack import Slack

if TYPE_CHECKING:
    from mstar_core.engine.cuda_graphs.cache import GraphCounts

log = logging.getLogger(__name__)

REST: Final = 3.0
"""Seconds of service after each second of warm-up between steps."""

MANY: Final = 2
"""Open requests that a capture may delay."""

MISSES_ALONE: Final = 8
"""Misses of a node after which a capture may delay the only open request, or the next one of a single client. The
prompt of one misses fewer times.
"""


def serves_first(incarnation: int) -> bool:
    """Return whether a worker serves before its warm-up: every life but the first.

    Requests wait for a restarted worker, and the kernels are compiled on disk. A first start warms up before it is
    ready, so that no request meets an uncaptured step or a kernel that is loaded for the first time.
    """
    return incarnation > 1


@dataclass(slots=True)
class LateWarmup:
    """Warm-up that is left. Filled by the start, owned by the worker's loop; no step is in flight during a piece.

    pieces: done in order as soon as possible, because they make steps fast. requests: synthetic requests; they would
    take the results of other requests, so they run without open ones. Afterwards each runner whose steps run uncaptured
    captures one graph after the other, those that were missed first, in the time that listeners leave (slack).
    open_requests: returns their number. Captures for the prompt of a single client wait for a quiet time, or for the
    misses of several requests: the request itself would not use them any more.
    """

    pieces: deque[Callable[[], object]] = field(default_factory=deque)
    requests: deque[Callable[[], object]] = field(default_factory=deque)
    runners: Mapping[str, NodeRunner] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    slack: Slack = field(default_factory=Slack)
    open_requests: Callable[[], int] = lambda: MANY
    _next: float = 0.0
    _misses: dict[str, int] = field(default_factory=dict)

    def is_due(self) -> bool:
        """Return whether a piece is due, so that no further step should be launched before it."""
        return self.clock() >= self._next and (bool(self.pieces) or self._missing() is not None)

    def wait_s(self) -> float:
        """Return the seconds until the next piece of an idle worker."""
        return max(0.0, self._next - self.clock()) if self.pieces else math.inf

    def work(self) -> None:
        """Do the piece that is due, and let steps run for a multiple of its time."""
        began = self.clock()
        if self.pieces:
            self._do(self.pieces.popleft())
        elif (name := self._missing()) is not None:
            self._capture(name, self.runners[name])
        self._next = self.clock() + REST * (self.clock() - began)

    def work_in_the_quiet(self, *, has_requests: bool) -> bool:
        """Do one piece in a quiet time. Returns False if there is none to do."""
        if self.pieces:
            self._do(self.pieces.popleft())
        elif self.requests and not has_requests:
            self._do(self.requests.popleft())
        else:
            return False
        return True

    def _missing(self) -> str | None:
        """Return a runner whose steps ran uncaptured since its last piece, and whose next capture no listener hears."""
        patience = MISSES_ALONE if self.open_requests() < 2 else 0
        for name, runner in self.runners.items():
            counts = runner.graph_counts
            misses = _misses(counts)
            if counts is not None and misses > self._misses.setdefault(name, misses) + patience and counts.planned():
                if counts.expected_s <= self.slack.left_s():
                    return name
        return None

    def _capture(self, name: str, runner: NodeRunner) -> None:
        counts = runner.graph_counts
        assert counts is not None
        self._misses[name] = _misses(counts)
        counts.takes_missed = True
        self._do(runner.idle)
        counts.takes_missed = False

    def _do(self, piece: Callable[[], object]) -> object:
        """Do a piece. An error is logged: the steps run uncaptured, or their first request waits for kernels."""
        try:
            return piece()
        except Exception:  # isolation boundary: an optimisation only
            log.exception("a piece of the warm-up failed; its steps run without it")
            return False


def _misses(counts: GraphCounts | None) -> int:
    return 0 if counts is None else counts.misses + counts.prefill_misses
