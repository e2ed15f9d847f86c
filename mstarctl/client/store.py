"""Client's copy of a deployment's state: decodes the frames of a watch and applies them.

It has no clock and no sockets. Objects are frozen, so later frames do not change a shallow copy. Used by
`requests --watch`, `top` and replay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import msgspec

from mstar_core.errors import TransportError
from mstar_core.observe.frames import (
    COUNTERS,
    ITEM_TYPES,
    PARTS,
    BeatFrame,
    DeltaFrame,
    Event,
    EventFrame,
    Frame,
    HelloFrame,
    Item,
    ResyncFrame,
    SnapshotFrame,
    StateFrame,
)
from mstar_core.observe.hub import EVENTS, NO_DEPLOYMENT, NO_GRAPH, HubState

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(slots=True, kw_only=True)
class Store(HubState):
    """The state of one deployment. Owned by the object that applies frames to it.

    rev: of the last applied frame. changes: incremented by each frame with a visible change (not by heartbeats).
    is_synced: a snapshot has arrived and no delta is missing since then. A store that is not synced ignores deltas, and
    a client that sees `has_gap` opens a new watch.
    """

    api: int = 0
    min_api: int = 0
    hz: float = 0.0
    readonly: bool = False
    changes: int = 0
    is_synced: bool = False
    has_gap: bool = False
    truncated: dict[str, int] = field(default_factory=dict)

    def apply(self, frame: Frame) -> None:
        """Apply one frame. Frames must come in the order in which one connection delivered them."""
        match frame:
            case HelloFrame():
                self._hello(frame)
            case SnapshotFrame():
                self._snapshot(frame)
            case DeltaFrame():
                self._delta(frame)
            case EventFrame():
                self._advance(frame.rev, frame.t)
                self._event(frame.event)
            case BeatFrame():
                self._advance(frame.rev, frame.t)
            case ResyncFrame():
                self.rev = frame.rev
                self.is_synced = False

    def copy(self) -> Store:
        """Return a copy that later frames do not change."""
        parts: dict[str, Any] = {name: dict(items) for name, items in self._parts().items()}
        return replace(self, **parts, events=deque(self.events, EVENTS), truncated=dict(self.truncated))

    def snapshot(self, events: int = 0) -> SnapshotFrame:
        """Return the state as one frame with its newest `events`. An empty store that applies it has the same state."""
        newest = list(self.events)[len(self.events) - events :] if events else []
        parts: dict[str, Any] = {name: dict(items) for name, items in self._parts().items()}
        return SnapshotFrame(
            rev=self.rev,
            t=self.t,
            deployment=self.deployment,
            graph=self.graph,
            **parts,
            events=[event.flat() for event in newest],
            truncated=dict(self.truncated),
        )

    # -- frames -----------------------------------------------------------------------------------------------

    def _hello(self, frame: HelloFrame) -> None:
        if frame.boot != self.boot:
            self._empty()
            self.boot = frame.boot
        self.api, self.min_api, self.hz, self.readonly = frame.api, frame.min_api, frame.hz, frame.readonly
        self.rev, self.is_synced, self.has_gap = frame.rev, False, False
        self.changes += 1

    def _snapshot(self, frame: SnapshotFrame) -> None:
        self._advance(frame.rev, frame.t)
        self.changes += 1
        self.is_synced, self.has_gap = True, False
        self.deployment = frame.deployment or NO_DEPLOYMENT
        self.graph = frame.graph
        for name, items in self._parts().items():
            items.clear()
            items.update(getattr(frame, name))
        self.truncated = dict(frame.truncated)
        for flat in frame.events:
            self._event(event_of(flat))

    def _delta(self, frame: DeltaFrame) -> None:
        if not self.is_synced:
            return
        if frame.after not in (-1, self.rev):
            self.is_synced, self.has_gap = False, True
            return
        self._advance(frame.rev, frame.t)
        self.changes += 1
        if frame.deployment:
            self.deployment = replaced(self.deployment, frame.deployment)
        if frame.graph is not None:
            self.graph = frame.graph
        if frame.truncated is not None:
            self.truncated = dict(frame.truncated)
        parts = self._parts()
        for part, keys in frame.delete.items():
            for key in keys:
                parts.get(part, {}).pop(key, None)
        for part, changed in frame.set.items():
            if part in ITEM_TYPES:
                _set(parts[part], ITEM_TYPES[part], changed)
        for part, increases in frame.add.items():
            if part in ITEM_TYPES:
                _add(parts[part], COUNTERS.get(part, frozenset()), increases)

    def _event(self, event: Event) -> None:
        if not self.events or event.n > self.events[-1].n:  # a snapshot repeats earlier events
            self.events.append(event)
            self.changes += 1

    def _advance(self, rev: int, t: float) -> None:
        self.rev, self.t = rev, t

    def _empty(self) -> None:
        self.deployment, self.graph = NO_DEPLOYMENT, NO_GRAPH
        for items in self._parts().values():
            items.clear()
        self.events.clear()
        self.truncated = {}
        self.t = 0.0

    def _parts(self) -> dict[str, dict[str, Any]]:
        return {name: self.part(name) for name in PARTS}


def _set(items: dict[str, Any], kind: type[Item], changed: Mapping[str, Mapping[str, Any]]) -> None:
    for key, fields in changed.items():
        old = items.get(key)
        items[key] = msgspec.convert(fields, type=kind) if old is None else replaced(old, fields)


def _add(items: dict[str, Any], counters: frozenset[str], increases: Mapping[str, Mapping[str, int]]) -> None:
    for key, fields in increases.items():
        old = items.get(key)
        if old is not None:
            sums = {name: getattr(old, name) + more for name, more in fields.items() if name in counters}
            items[key] = replaced(old, sums)


def replaced(old: S, fields: Mapping[str, Any]) -> S:
    """Return `old` with the fields of a delta. Unknown fields are ignored; wrong types raise ValidationError."""
    return msgspec.convert({**msgspec.structs.asdict(old), **fields}, type=type(old))


_EVENT_FIELDS: Final = frozenset({"k", "n", "type", "time", "t", "rev"})


def event_of(flat: dict[str, Any]) -> Event:
    """Return the event of a flat record, as made by `Event.flat` or read from an event frame."""
    facts = {key: value for key, value in flat.items() if key not in _EVENT_FIELDS}
    head: dict[str, Any] = {key: flat[key] for key in ("n", "type", "time", "t", "rev") if key in flat}
    return msgspec.convert({**head, "facts": facts}, type=Event)


def decode(line: bytes | str) -> Frame | None:
    """Decode one line; None for a kind that a newer server added. Raises TransportError for a malformed line."""
    try:
        raw = msgspec.json.decode(line)
        kind = raw.get("k")
        if kind == "event":
            event = event_of(raw)
            return EventFrame(rev=event.rev, t=event.t, event=event)
        if kind not in _KINDS:
            return None
        return msgspec.convert(raw, type=_KINDS[kind])
    except (msgspec.MsgspecError, AttributeError, TypeError, ValueError) as error:
        raise TransportError("a frame of the admin socket could not be read", f"{len(line)} bytes: {error}") from error


_KINDS: Final[dict[str, type[StateFrame]]] = {
    "hello": HelloFrame,
    "snapshot": SnapshotFrame,
    "delta": DeltaFrame,
    "beat": BeatFrame,
    "resync": ResyncFrame,
}
