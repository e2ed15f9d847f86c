"""One watcher of the hub: what it knows, what changed since, and the frames that bring it up to date."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from mstar_core.observe.filter import Filter
from mstar_core.observe.frames import (
    BEAT_S,
    COUNTERS,
    SNAPSHOT_REQUESTS,
    BeatFrame,
    DeltaFrame,
    EventFrame,
    Frame,
    HelloFrame,
    Item,
    Part,
    Request,
    ResyncFrame,
    SnapshotFrame,
)
from mstar_core.observe.store import changed_fields

if TYPE_CHECKING:
    from mstar_core.observe.hub import Hub

NEVER: Final = float("-inf")


class Subscription:
    """Owned by the hub's list; read by the one stream that opened it. `frames` is called when its socket is writable.

    dirty: (part, key) -> the object as this watcher knows it, None when it does not. known: requests that it has seen;
    with a filter or past the limit that is fewer than there are.
    """

    def __init__(self, hub: Hub, *, parts: frozenset[str], filter: Filter, hz: float, readonly: bool) -> None:
        self.hz = hz
        self.dirty: dict[tuple[Part, str], Item | None] = {}
        self.known: set[str] = set()
        self._hub = hub
        self._parts = parts
        self._filter = filter
        self._readonly = readonly
        self._has_begun = False
        self._sent_rev = -1
        self._sent_at = NEVER
        self._event = 0
        self._head = hub.store.deployment
        self._graph = hub.store.graph
        self._truncated = 0

    def note(self, part: Part, key: str, old: Item | None) -> None:
        """An object changed. old: as it was before, None for a new one."""
        if part not in self._parts:
            return
        where = (part, key)
        if where not in self.dirty:
            self.dirty[where] = old
        elif self.dirty[where] is None and key not in self._hub.store.part(part):
            del self.dirty[where]  # it came and went in between: this watcher never knew it

    def frames(self) -> list[Frame]:
        """What to send now: first hello and a snapshot, later what changed, a beat when two seconds were silent."""
        hub = self._hub
        now = hub.now()
        if not self._has_begun:
            self._has_begun = True
            made: list[Frame] = [
                HelloFrame(boot=hub.boot, hz=self.hz, rev=hub.rev, readonly=self._readonly),
                self._snapshot(),
            ]
        elif self._has_lost_events():
            made = [ResyncFrame(rev=hub.rev, why="slow"), self._snapshot()]
        else:
            made = list(self._news(now))
        if made:
            self._sent_at = now
        return made

    # -- frames ---------------------------------------------------------------------------------------------------

    def _snapshot(self) -> SnapshotFrame:
        store = self._hub.store
        made = self._hub.picture(self._parts, self._filter)
        self.known = set(made.requests)
        self.dirty.clear()
        self._head, self._graph = store.deployment, store.graph
        self._truncated = made.truncated["requests"]
        self._event = store.events[-1].n if store.events else 0
        self._sent_rev = made.rev
        return made

    def _news(self, now: float) -> Iterator[Frame]:
        if "events" in self._parts:
            for event in self._hub.events_after(self._event):
                self._event = event.n
                # An event is older than the state that follows it in the same moment: revisions never go back.
                rev = self._sent_rev = max(self._sent_rev, event.rev)
                yield EventFrame(rev=rev, t=event.t, event=event)
        delta = self._delta(now)
        if delta is not None:
            self._sent_rev = delta.rev
            yield delta
        elif now - self._sent_at >= BEAT_S:
            self._sent_rev = self._hub.rev
            yield BeatFrame(rev=self._hub.rev, t=now)

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

    def _request(self, changes: _Changes, key: str, old: Item | None, new: Request | None, now: float) -> None:
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
        """Requests left out, if that number changed. Rooms that came free are filled."""
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
    """The parts of a delta, as they are found."""

    def __init__(self) -> None:
        self.set: dict[str, dict[str, dict[str, Any]]] = {}
        self.delete: dict[str, list[str]] = {}
        self.add: dict[str, dict[str, dict[str, int]]] = {}

    @property
    def has_any(self) -> bool:
        return bool(self.set or self.delete or self.add)

    def add_change(self, part: Part, key: str, old: Item | None, new: Item | None) -> None:
        """What leads from one state of an object to the next."""
        if new is None:
            if old is not None:
                self.delete.setdefault(part, []).append(key)
        elif old is None:
            self.set.setdefault(part, {})[key] = msgspec.to_builtins(new)
        else:
            fields = changed_fields(old, new)
            for name in COUNTERS.get(part, frozenset()) & fields.keys():
                more = fields[name] - getattr(old, name)
                if more > 0:  # a counter that fell has begun anew, and is set
                    self.add.setdefault(part, {}).setdefault(key, {})[name] = more
                    del fields[name]
            if fields:
                self.set.setdefault(part, {})[key] = fields
