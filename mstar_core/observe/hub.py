"""Telemetry hub: the state of one deployment and its watchers. Owned by the supervisor, used on its loop.

A watcher has no queue. The hub notes for each watcher which objects changed since its last frame, and their state in
that frame. A blocked watcher costs one entry per object and delays nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import msgspec

from mstar_core.errors import Unavailable, UsageError, did_you_mean
from mstar_core.observe.filter import Filter
from mstar_core.observe.frames import (
    BEAT_S,
    COUNTERS,
    PARTS,
    SNAPSHOT_EVENTS,
    SNAPSHOT_REQUESTS,
    BeatFrame,
    ChildStatus,
    DeltaFrame,
    DeploymentStatus,
    EdgeStatus,
    Event,
    EventFrame,
    Frame,
    GpuStatus,
    GraphView,
    HelloFrame,
    HostStatus,
    Item,
    NodeStatus,
    Part,
    RankStatus,
    RequestStatus,
    ResyncFrame,
    SessionStatus,
    SnapshotFrame,
)

SUBSCRIBERS: Final = 16
READERS: Final = 8
"""Most watchers with read permission alone, so that the owner always finds a place."""

HZ_MIN: Final = 0.1
HZ_MAX: Final = 10.0
SELECTABLE: Final = (*PARTS, "graph", "events")
"""Parts that a reader may select. The head is always included."""


EVENTS: Final = 2000
"""Size of the ring of events."""

NO_DEPLOYMENT: Final = DeploymentStatus(name="")
NO_GRAPH: Final = GraphView()


@dataclass(slots=True, kw_only=True)
class HubState:
    """The state of one deployment. Owned by the hub; clients extend it by the frames that they apply. rev: revision."""

    boot: str = ""
    rev: int = -1
    t: float = 0.0
    deployment: DeploymentStatus = NO_DEPLOYMENT
    graph: GraphView = NO_GRAPH
    ranks: dict[str, RankStatus] = field(default_factory=dict)
    nodes: dict[str, NodeStatus] = field(default_factory=dict)
    requests: dict[str, RequestStatus] = field(default_factory=dict)
    edges: dict[str, EdgeStatus] = field(default_factory=dict)
    gpus: dict[str, GpuStatus] = field(default_factory=dict)
    children: dict[str, ChildStatus] = field(default_factory=dict)
    hosts: dict[str, HostStatus] = field(default_factory=dict)
    sessions: dict[str, SessionStatus] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS))

    def part(self, name: str) -> dict[str, Item]:
        """Return the objects of one of `PARTS` by key. Raises KeyError for another name."""
        if name not in PARTS:
            raise KeyError(name)
        items: dict[str, Item] = getattr(self, name)
        return items


class TelemetryHub:
    """State and watchers. The state publisher calls `put`, `remove`, `head`, `graph` and `event`.

    Each change increments the revision. The hub runs on one thread and needs no lock. watched: set while it has a
    watcher.
    """

    def __init__(self, boot: str, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.store = HubState(boot=boot, rev=0, deployment=DeploymentStatus(name=name))
        self.watched = asyncio.Event()
        self._clock = clock
        self._subscriptions: list[Subscription] = []

    @property
    def watchers(self) -> int:
        """Number of open subscriptions."""
        return len(self._subscriptions)

    def now(self) -> float:
        """Return the time of the deployment's clock."""
        return self._clock()

    # -- changes ------------------------------------------------------------------------------------------------------

    def put(self, part: Part, key: str, item: Item) -> None:
        """Set one object of a part. An equal object changes nothing."""
        items = self.store.part(part)
        old = items.get(key)
        if old == item:
            return
        items[key] = item
        self._changed(part, key, old)

    def remove(self, part: Part, key: str) -> None:
        """Remove one object, if it exists."""
        old = self.store.part(part).pop(key, None)
        if old is not None:
            self._changed(part, key, old)

    def head(self, deployment: DeploymentStatus) -> None:
        """Set the head."""
        if deployment != self.store.deployment:
            self.store.deployment = deployment
            self.store.rev += 1

    def graph(self, graph: GraphView) -> None:
        """Set the graph of the model."""
        if graph != self.store.graph:
            self.store.graph = graph
            self.store.rev += 1

    def event(self, event: Event) -> None:
        """Add one event to the ring, with the next revision."""
        self.store.rev += 1
        self.store.events.append(
            Event(n=event.n, type=event.type, time=event.time, t=self.now(), rev=self.store.rev, facts=event.facts)
        )

    # -- readers ------------------------------------------------------------------------------------------------------

    def subscribe(
        self, *, parts: Collection[str] = (), filter_text: str = "", hz: float = 4.0, readonly: bool = False
    ) -> Subscription:
        """Add a watcher. The caller must call `unsubscribe`. parts: none named means all.

        Raises Unavailable if there are 16 watchers, or 8 with read permission alone. Raises UsageError for an unknown
        part, a bad filter or a bad rate.
        """
        chosen = check_parts(parts)
        if not HZ_MIN <= hz <= HZ_MAX:
            raise UsageError(f"hz is {hz:g}", hint=f"choose {HZ_MIN:g} to {HZ_MAX:g}")
        chosen_filter = Filter.parse(filter_text)
        readers = sum(subscription.readonly for subscription in self._subscriptions) if readonly else 0
        if len(self._subscriptions) >= SUBSCRIBERS or readers >= READERS:
            raise Unavailable(
                "this deployment has too many watchers",
                f"{len(self._subscriptions)} are connected, {readers} of them with read permission alone",
                "close one of them",
                code="too_many_watchers",
            )
        subscription = Subscription(self, parts=chosen, filter=chosen_filter, hz=hz, readonly=readonly)
        self._subscriptions.append(subscription)
        self.watched.set()
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Remove a watcher. Idempotent."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
        if not self._subscriptions:
            self.watched.clear()

    def snapshot(
        self, *, parts: Collection[str] = (), filter_text: str = "", events: int = SNAPSHOT_EVENTS
    ) -> SnapshotFrame:
        """Return a consistent snapshot. Raises UsageError for an unknown part or a bad filter."""
        return self.filtered_snapshot(check_parts(parts), Filter.parse(filter_text), events)

    def filtered_snapshot(self, parts: Collection[str], chosen: Filter, events: int = SNAPSHOT_EVENTS) -> SnapshotFrame:
        """Return a snapshot of validated parts with a parsed filter."""
        store, now = self.store, self.now()
        store.t = now
        selected: dict[str, Any] = {part: dict(store.part(part)) for part in PARTS if part in parts}
        cut = 0
        if "requests" in parts:
            requests = {key: request for key, request in store.requests.items() if chosen.takes(request, now)}
            cut = max(0, len(requests) - SNAPSHOT_REQUESTS)
            selected["requests"] = dict(islice(requests.items(), SNAPSHOT_REQUESTS))
        newest = list(store.events)[-events:] if events and "events" in parts else []
        return SnapshotFrame(
            rev=store.rev,
            t=now,
            deployment=store.deployment,
            graph=store.graph if "graph" in parts else GraphView(),
            **selected,
            events=[event.flat() for event in newest],
            truncated={"requests": cut},
        )

    def events_after(self, number: int) -> Iterator[Event]:
        """Yield the events of the ring with a higher number, oldest first."""
        events = self.store.events
        if not events or events[-1].n <= number:
            return
        yield from (event for event in list(events) if event.n > number)

    # -- internal -----------------------------------------------------------------------------------------------------

    def _changed(self, part: Part, key: str, old: Item | None) -> None:
        self.store.rev += 1
        for subscription in self._subscriptions:
            subscription.note(part, key, old)


def check_parts(parts: Collection[str]) -> frozenset[str]:
    """Return the selected parts; none named means all. Raises UsageError with the nearest name."""
    for part in parts:
        if part not in SELECTABLE:
            raise UsageError(f"unknown part {part!r}", hint=did_you_mean(part, SELECTABLE))
    return frozenset(parts or SELECTABLE)


NEVER: Final = float("-inf")


class Subscription:
    """One watcher of the hub. Owned by the stream that opened it, which calls `frames` when its socket is writable.

    dirty: (part, key) -> the object as the watcher knows it, None if it does not. known: requests that the watcher has
    seen, which a filter or the limit may reduce.
    """

    def __init__(self, hub: TelemetryHub, *, parts: frozenset[str], filter: Filter, hz: float, readonly: bool) -> None:
        self.hz = hz
        self.dirty: dict[tuple[Part, str], Item | None] = {}
        self.known: set[str] = set()
        self._hub = hub
        self._parts = parts
        self._filter = filter
        self.readonly = readonly
        self._has_begun = False
        self._sent_rev = -1
        self._sent_at = NEVER
        self._event = 0
        self._head = hub.store.deployment
        self._graph = hub.store.graph
        self._truncated = 0

    def note(self, part: Part, key: str, old: Item | None) -> None:
        """Note that an object changed. old: its previous state, None for a new one."""
        if part not in self._parts:
            return
        where = (part, key)
        if where not in self.dirty:
            self.dirty[where] = old
        elif self.dirty[where] is None and key not in self._hub.store.part(part):
            del self.dirty[where]  # added and removed since the last frame

    def frames(self) -> list[Frame]:
        """Return the frames to send now: first hello and a snapshot, then changes, a heartbeat after 2 s of silence."""
        hub = self._hub
        now = hub.now()
        if not self._has_begun:
            self._has_begun = True
            frames: list[Frame] = [
                HelloFrame(boot=hub.store.boot, hz=self.hz, rev=hub.store.rev, readonly=self.readonly),
                self._snapshot(),
            ]
        elif self._has_lost_events():
            frames = [ResyncFrame(rev=hub.store.rev, why="slow"), self._snapshot()]
        else:
            frames = list(self._news(now))
        if frames:
            self._sent_at = now
        return frames

    # -- frames ---------------------------------------------------------------------------------------------------

    def _snapshot(self) -> SnapshotFrame:
        store = self._hub.store
        snapshot = self._hub.filtered_snapshot(self._parts, self._filter)
        self.known = set(snapshot.requests)
        self.dirty.clear()
        self._head, self._graph = store.deployment, store.graph
        self._truncated = snapshot.truncated["requests"]
        self._event = store.events[-1].n if store.events else 0
        self._sent_rev = snapshot.rev
        return snapshot

    def _news(self, now: float) -> Iterator[Frame]:
        if "events" in self._parts:
            for event in self._hub.events_after(self._event):
                self._event = event.n
                # The event precedes the state of the same update; revisions never decrease.
                rev = self._sent_rev = max(self._sent_rev, event.rev)
                yield EventFrame(rev=rev, t=event.t, event=event)
        delta = self._delta(now)
        if delta is not None:
            self._sent_rev = delta.rev
            yield delta
        elif now - self._sent_at >= BEAT_S:
            self._sent_rev = self._hub.store.rev
            yield BeatFrame(rev=self._hub.store.rev, t=now)

    def _has_lost_events(self) -> bool:
        events = self._hub.store.events
        return "events" in self._parts and bool(events) and events[0].n > self._event + 1

    def _delta(self, now: float) -> DeltaFrame | None:
        store = self._hub.store
        changes = _Changes()
        for (part, key), old in self._dirty().items():
            new = store.part(part).get(key)
            if part == "requests":
                self._request(changes, key, old, store.requests.get(key), now)
            else:
                changes.add_change(part, key, old, new)
        self.dirty.clear()
        truncated = self._cut(changes, now)
        head: dict[str, Any] = {}
        if store.deployment is not self._head:
            head, self._head = changed_fields(self._head, store.deployment), store.deployment
        graph = None
        if store.graph is not self._graph and "graph" in self._parts:
            graph = self._graph = store.graph
        if not (changes.has_any or head or graph is not None or truncated is not None):
            return None
        return DeltaFrame(
            rev=store.rev,
            t=now,
            after=self._sent_rev,
            deployment=head,
            set=changes.set,
            delete=changes.delete,
            add=changes.add,
            graph=graph,
            truncated=None if truncated is None else {"requests": truncated},
        )

    def _dirty(self) -> dict[tuple[Part, str], Item | None]:
        if not self._filter.is_timed or "requests" not in self._parts:
            return self.dirty
        requests: dict[tuple[Part, str], Item | None] = {
            ("requests", k): r for k, r in self._hub.store.requests.items()
        }
        return {**requests, **self.dirty}

    def _request(self, changes: _Changes, key: str, old: Item | None, new: RequestStatus | None, now: float) -> None:
        is_known = key in self.known
        if new is not None and self._filter.takes(new, now):
            if not is_known and len(self.known) >= SNAPSHOT_REQUESTS:
                return
            self.known.add(key)
            changes.add_change("requests", key, old if is_known else None, new)
        elif is_known:
            self.known.discard(key)
            changes.delete.setdefault("requests", []).append(key)

    def _cut(self, changes: _Changes, now: float) -> int | None:
        """Fill free places with further requests. Returns the number left out, None if it did not change."""
        store = self._hub.store
        if "requests" not in self._parts or (not self._truncated and len(store.requests) <= SNAPSHOT_REQUESTS):
            return None
        cut = 0
        for key, request in store.requests.items():
            if key in self.known or not self._filter.takes(request, now):
                continue
            if len(self.known) < SNAPSHOT_REQUESTS:
                self.known.add(key)
                changes.add_change("requests", key, None, request)
            else:
                cut += 1
        if cut == self._truncated:
            return None
        self._truncated = cut
        return cut


class _Changes:
    """The parts of a delta."""

    def __init__(self) -> None:
        self.set: dict[str, dict[str, dict[str, Any]]] = {}
        self.delete: dict[str, list[str]] = {}
        self.add: dict[str, dict[str, dict[str, int]]] = {}

    @property
    def has_any(self) -> bool:
        return bool(self.set or self.delete or self.add)

    def add_change(self, part: Part, key: str, old: Item | None, new: Item | None) -> None:
        """Add the difference between two states of an object."""
        if new is None:
            if old is not None:
                self.delete.setdefault(part, []).append(key)
        elif old is None:
            self.set.setdefault(part, {})[key] = msgspec.to_builtins(new)
        else:
            fields = changed_fields(old, new)
            for name in COUNTERS.get(part, frozenset()) & fields.keys():
                more = fields[name] - getattr(old, name)
                if more > 0:  # a counter that fell was reset, so it is set
                    self.add.setdefault(part, {}).setdefault(key, {})[name] = more
                    del fields[name]
            if fields:
                self.set.setdefault(part, {})[key] = fields


def changed_fields(old: msgspec.Struct, new: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of `new` that differ from `old`. Called for each object of each frame."""
    before, after = msgspec.structs.astuple(old), msgspec.structs.astuple(new)
    fields = zip(new.__struct_fields__, before, after, strict=True)
    return {name: value for name, was, value in fields if value is not was and value != was}
