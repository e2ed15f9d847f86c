"""Who steps next on this device: fair shares of device time among nodes with ready work. No tensors here."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from mstar_core.engine.base import NodeRunner


@dataclass(slots=True)
class FairShare:
    """Chooses the node that has had the least device time among those with ready work. Owned by the worker's loop.

    A light node (a codec) is therefore served as soon as it has something, and a heavy one (a language model) takes
    the rest; a node that was idle starts level with the others, so it cannot save up time. A row that has waited
    longer than `patience_s` goes first whatever the shares say.
    """

    runners: Mapping[str, NodeRunner]
    clock: Callable[[], float] = time.monotonic
    patience_s: float = 0.5
    used_s: dict[str, float] = field(default_factory=dict)
    idle: set[str] = field(default_factory=set)

    def choose(self, waiting: Collection[str] = ()) -> NodeRunner | None:
        """The runner to launch now, or None when nothing is ready. waiting: nodes that just had nothing to launch."""
        ready = {name: p for name, runner in self.runners.items()
                 if name not in waiting and (p := runner.pressure()).ready}  # fmt: skip
        if not ready:
            self.idle = set(self.runners)
            return None
        busy = [self.used_s.get(name, 0.0) for name in ready if name not in self.idle]
        floor = min(busy, default=max(self.used_s.values(), default=0.0))
        for name in ready:
            if name in self.idle:
                self.used_s[name] = max(self.used_s.get(name, 0.0), floor)
        self.idle = set(self.runners) - set(ready)
        oldest = min(ready, key=lambda name: ready[name].oldest_s)
        if self.clock() - ready[oldest].oldest_s > self.patience_s:
            return self.runners[oldest]
        return self.runners[min(ready, key=lambda name: (self.used_s.get(name, 0.0), name))]

    def charge(self, name: str, duration_s: float) -> None:
        """Account a step's device time to its node."""
        self.used_s[name] = self.used_s.get(name, 0.0) + duration_s
