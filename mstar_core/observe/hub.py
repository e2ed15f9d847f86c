"""The telemetry hub: one deployment's state and everyone who watches it. Owned by the supervisor, used on its loop.

A watcher has no queue. The hub notes per watcher which objects changed since its last frame and what the watcher then
knew of them, so a frozen one costs one entry per object that it knows, and nobody waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Final

from mstar_core.errors import Unavailable, UsageError, did_you_mean
from mstar_core.observe.filter import Filter
from mstar_core.observe.frames import PARTS, Deployment, Event, Graph, Item, Part, Request, SnapshotFrame
from mstar_core.observe.frames import SNAPSHOT_EVENTS as EVENTS_SHOWN
from mstar_core.observe.frames import SNAPSHOT_REQUESTS as LIMIT
from mstar_core.observe.store import Store
from mstar_core.observe.subscription import Subscription

SUBSCRIBERS: Final = 16
HZ_MIN: Final = 0.1
HZ_MAX: Final = 10.0
ASKABLE: Final = (*PARTS, "graph", "events")
"""Parts that a reader may ask for; the head comes with each."""


class Hub:
    """State and watchers. `put`, `remove`, `head` and `event` are called by whoever learns something.

    The revision rises with each change; the hub runs on one thread, so nothing is locked.
    """

    def __init__(self, boot: str, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.store = Store(boot=boot, rev=0, is_synced=True, deployment=Deployment(name=name))
        self._clock = clock
        self._subscriptions: list[Subscription] = []
        self._parts = {part: self.store.part(part) for part in PARTS}

    @property
    def boot(self) -> str:
        """Changes with each start of a deployment."""
        return self.store.boot

    @property
    def rev(self) -> int:
        """Number of changes so far."""
        return self.store.rev

    @property
    def watchers(self) -> int:
        """Subscriptions that are open."""
        return len(self._subscriptions)

    def now(self) -> float:
        """The deployment's clock."""
        return self._clock()

    # -- what changes -------------------------------------------------------------------------------------------------

    def put(self, part: Part, key: str, item: Item) -> None:
        """Set one object of a part. Nothing happens when it is as it was."""
        items = self._items(part)
        old = items.get(key)
        if old == item:
            return
        items[key] = item
        self._changed(part, key, old)

    def remove(self, part: Part, key: str) -> None:
        """Remove one object, if it is there."""
        old = self._items(part).pop(key, None)
        if old is not None:
            self._changed(part, key, old)

    def head(self, deployment: Deployment) -> None:
        """Set the head."""
        if deployment != self.store.deployment:
            self.store.deployment = deployment
            self.store.rev += 1

    def graph(self, graph: Graph) -> None:
        """Set the model's graph."""
        if graph != self.store.graph:
            self.store.graph = graph
            self.store.rev += 1

    def event(self, event: Event) -> None:
        """Add one event to the ring. Its revision is given here."""
        self.store.rev += 1
        self.store.events.append(
            Event(n=event.n, type=event.type, time=event.time, t=self.now(), rev=self.store.rev, facts=event.facts)
        )

    # -- who reads ----------------------------------------------------------------------------------------------------

    def subscribe(
        self, *, parts: Collection[str] = (), filter_text: str = "", hz: float = 4.0, readonly: bool = False
    ) -> Subscription:
        """A new watcher; whoever opened it calls `unsubscribe`. parts: none named means all.

        Raises Unavailable when 16 watch already, UsageError for an unknown part, a wrong filter or a pace out of range.
        """
        chosen = check_parts(parts)
        if not HZ_MIN <= hz <= HZ_MAX:
            raise UsageError(f"hz is {hz:g}", hint=f"choose {HZ_MIN:g} to {HZ_MAX:g}")
        chosen_filter = Filter.parse(filter_text)
        if len(self._subscriptions) >= SUBSCRIBERS:
            raise Unavailable(
                "too many watch this deployment", f"{SUBSCRIBERS} do", "end one of them", code="too_many_watchers"
            )
        made = Subscription(self, parts=chosen, filter=chosen_filter, hz=hz, readonly=readonly)
        self._subscriptions.append(made)
        return made

    def unsubscribe(self, subscription: Subscription) -> None:
        """Forget a watcher. Safe to call twice."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def snapshot(
        self, *, parts: Collection[str] = (), filter_text: str = "", events: int = EVENTS_SHOWN
    ) -> SnapshotFrame:
        """One consistent view of now. Raises UsageError for an unknown part or a wrong filter."""
        return self.picture(check_parts(parts), Filter.parse(filter_text), events)

    def picture(self, parts: Collection[str], chosen: Filter, events: int = EVENTS_SHOWN) -> SnapshotFrame:
        """As `snapshot`, of parts and a filter that were checked before."""
        store, now = self.store, self.now()
        store.t = now
        requests, cut = self.matching(chosen, now) if "requests" in parts else ({}, 0)
        newest = list(store.events)[-events:] if events and "events" in parts else []
        return SnapshotFrame(
            rev=store.rev,
            t=now,
            deployment=store.deployment,
            graph=store.graph if "graph" in parts else Graph(),
            ranks=dict(store.ranks) if "ranks" in parts else {},
            nodes=dict(store.nodes) if "nodes" in parts else {},
            requests=requests,
            edges=dict(store.edges) if "edges" in parts else {},
            gpus=dict(store.gpus) if "gpus" in parts else {},
            children=dict(store.children) if "children" in parts else {},
            events=[event.flat() for event in newest],
            truncated={"requests": cut},
        )

    def matching(self, chosen: Filter, now: float) -> tuple[dict[str, Request], int]:
        """Requests that a filter takes, at most 2000, and how many were left out. The filter comes before the limit."""
        found: dict[str, Request] = {}
        cut = 0
        for key, request in self.store.requests.items():
            if not chosen.takes(request, now):
                continue
            if len(found) < LIMIT:
                found[key] = request
            else:
                cut += 1
        return found, cut

    def events_after(self, number: int) -> Iterator[Event]:
        """Events of the ring with a higher number, oldest first."""
        events = self.store.events
        if not events or events[-1].n <= number:
            return
        yield from (event for event in list(events) if event.n > number)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _items(self, part: Part) -> dict[str, Item]:
        return self._parts[part]  # type: ignore[return-value]  # the hub is the store's one writer

    def _changed(self, part: Part, key: str, old: Item | None) -> None:
        self.store.rev += 1
        for subscription in self._subscriptions:
            subscription.note(part, key, old)


def check_parts(parts: Collection[str]) -> frozenset[str]:
    """The parts asked for; none named means all. Raises UsageError with the nearest name."""
    for part in parts:
        if part not in ASKABLE:
            raise UsageError(f"there is no part {part!r}", hint=did_you_mean(part, ASKABLE))
    return frozenset(parts or ASKABLE)
