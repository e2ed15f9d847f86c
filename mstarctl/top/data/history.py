"""Five minutes of the figures that screens draw as curves, one value a second. Owned by the session."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from mstar_core.observe.frames import GpuStatus, NodeStatus, RankStatus
from mstar_core.observe.store import Store

SECONDS: Final = 300
Series = tuple[str, str, str]
"""(part, key, field): `("nodes", "Thinker@1", "step_ms")`. The deployment's key is empty."""

FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "deployment": ("running", "waiting", "ttft_p50_ms", "tokens_s", "audio_x"),
    "ranks": ("busy", "pages", "memory"),
    "gpus": ("util", "memory", "power_w"),
    "nodes": ("busy", "step_ms", "queue", "batch", "tokens_s"),
}


class History:
    """Values by series, newest last. A series that is not reported for a second has None there."""

    def __init__(self) -> None:
        self._seconds: deque[int] = deque(maxlen=SECONDS)
        self._values: dict[Series, deque[float | None]] = {}
        self._boot = ""

    def note(self, store: Store) -> None:
        """Take the store's figures when a second of its time has begun. A new boot begins anew."""
        if store.boot != self._boot:
            self._seconds.clear()
            self._values.clear()
            self._boot = store.boot
        second = int(store.t)
        if not store.is_synced or (self._seconds and second <= self._seconds[-1]):
            return
        before = len(self._seconds)
        self._seconds.append(second)
        now = dict(figures(store))
        for series in self._values.keys() | now.keys():
            if series not in self._values:
                self._values[series] = deque([None] * min(before, SECONDS - 1), maxlen=SECONDS)
            self._values[series].append(now.get(series))
        if before == SECONDS:
            self._forget()

    def values(self, part: str, key: str, name: str, until: float) -> list[float | None]:
        """The series up to the time `until` of the store, oldest first."""
        found = self._values.get((part, key, name))
        if found is None:
            return []
        late = sum(1 for second in reversed(self._seconds) if second > until)
        return list(found)[: len(found) - late]

    @property
    def span_s(self) -> int:
        """Seconds from the oldest value to the newest."""
        return self._seconds[-1] - self._seconds[0] if self._seconds else 0

    def _forget(self) -> None:
        gone = [series for series, values in self._values.items() if all(value is None for value in values)]
        for series in gone:
            del self._values[series]


def figures(store: Store) -> Iterator[tuple[Series, float | None]]:
    """What is remembered of a store."""
    head = store.deployment
    yield from (
        (("deployment", "", name), value)
        for name, value in (
            ("running", head.running),
            ("waiting", head.waiting),
            ("ttft_p50_ms", head.ttft_p50_ms),
            ("tokens_s", head.tokens_s),
            ("audio_x", head.audio_x),
        )
    )
    for key, rank in store.ranks.items():
        yield from ((("ranks", key, name), value) for name, value in _rank(rank).items())
    for key, node in store.nodes.items():
        yield from ((("nodes", key, name), value) for name, value in _node(node).items())
    for key, gpu in store.gpus.items():
        yield from ((("gpus", key, name), value) for name, value in _gpu(gpu).items())


def _rank(rank: RankStatus) -> dict[str, float | None]:
    pages = rank.pages_used / rank.pages_total if rank.pages_total else None
    memory = rank.memory_used / rank.memory_total if rank.memory_used and rank.memory_total else None
    return {"busy": rank.busy, "pages": pages, "memory": memory}


def _node(node: NodeStatus) -> dict[str, float | None]:
    return {
        "busy": node.busy,
        "step_ms": node.step_ms,
        "queue": node.queue,
        "batch": node.batch,
        "tokens_s": node.tokens_s,
    }


def _gpu(gpu: GpuStatus) -> dict[str, float | None]:
    memory = gpu.memory_used / gpu.memory_total if gpu.memory_used and gpu.memory_total else None
    return {"util": gpu.util, "memory": memory, "power_w": gpu.power_w}
