"""History of figures for curves: five minutes, one value per second. Owned by the session."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from mstarctl.client.store import Store
from mstarctl.top.drawing.numbers import part

SECONDS: Final = 300
Series = tuple[str, str, str]
"""(part, key, field): `("nodes", "Thinker@1", "step_ms")`. The deployment's key is empty."""

FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "deployment": ("running", "waiting", "ttft_p50_ms", "tokens_s", "audio_x", "requests_s"),
    "ranks": ("busy", "pages", "memory"),
    "gpus": ("util", "memory", "power_w"),
    "nodes": ("busy", "step_ms", "queue", "batch", "tokens_s"),
}
"""Recorded fields by part. `pages` and `memory` are shares, computed from `_used` and `_total`."""


class History:
    """Values by series, newest last. A second without a value is None."""

    def __init__(self) -> None:
        self._seconds: deque[int] = deque(maxlen=SECONDS)
        self._values: dict[Series, deque[float | None]] = {}
        self._boot = ""

    def note(self, store: Store) -> None:
        """Record the store's figures once per second of its time. A new boot clears the history."""
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
            self._drop_empty()

    def values(self, part: str, key: str, name: str, until: float) -> list[float | None]:
        """Return the series up to the time `until` of the store, oldest first."""
        series = self._values.get((part, key, name))
        if series is None:
            return []
        late = sum(1 for second in reversed(self._seconds) if second > until)
        return list(series)[: len(series) - late]

    @property
    def span_s(self) -> int:
        """Seconds from the oldest value to the newest."""
        return self._seconds[-1] - self._seconds[0] if self._seconds else 0

    def _drop_empty(self) -> None:
        for series in [s for s, values in self._values.items() if all(value is None for value in values)]:
            del self._values[series]


def figures(store: Store) -> Iterator[tuple[Series, float | None]]:
    """Yield the recorded figures of a store."""
    for name, fields in FIELDS.items():
        items: dict[str, Any] = {"": store.deployment} if name == "deployment" else dict(store.part(name))
        for key, item in items.items():
            for field in fields:
                yield (name, key, field), _value(item, field)


def _value(item: Any, field: str) -> float | None:
    if field in ("pages", "memory"):
        return part(getattr(item, f"{field}_used"), getattr(item, f"{field}_total"))
    value: float | None = getattr(item, field)
    return value
