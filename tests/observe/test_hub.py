"""Telemetry hub: every watcher reaches the hub's state at any rate and filter, and its memory is bounded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar_core.conformance.clock import FakeClock
from mstar_core.errors import Unavailable, UsageError
from mstar_core.observe.frames import (
    PARTS,
    BeatFrame,
    ChildStatus,
    DeltaFrame,
    DeploymentStatus,
    EdgeStatus,
    Event,
    EventFrame,
    GraphView,
    HelloFrame,
    NodeStatus,
    NodeView,
    RequestStatus,
    ResyncFrame,
    SnapshotFrame,
    encode,
)
from mstar_core.observe.hub import EVENTS, SUBSCRIBERS, Subscription, TelemetryHub
from mstarctl.client.store import Store, decode


class Watcher:
    """A client that reads its subscription through the wire format."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.store = Store()
        self.kinds: list[str] = []

    def read(self) -> int:
        size = 0
        for made in self.subscription.frames():
            line = encode(made)
            size += len(line)
            frame = decode(line)
            assert frame is not None
            self.kinds.append(type(frame).__name__.removesuffix("Frame").lower())
            self.store.apply(frame)
            assert not self.store.has_gap
        return size


def make_hub() -> tuple[TelemetryHub, FakeClock]:
    clock = FakeClock()
    return TelemetryHub("boot-1", "d", clock), clock


def request(number: int, **fields: Any) -> RequestStatus:
    return RequestStatus(id=f"r-{number}", handle=number, **fields)


def test_a_watch_begins_with_hello_and_a_snapshot_of_everything() -> None:
    hub, _ = make_hub()
    hub.put("requests", "1", request(1))
    hub.put("children", "api", ChildStatus(name="api"))
    hub.graph(GraphView(model="m", nodes=[NodeView(name="LLM")]))
    hub.event(Event(n=1, type="deployment.starting"))
    watcher = Watcher(hub.subscribe(hz=2, readonly=True))
    watcher.read()
    assert watcher.kinds == ["hello", "snapshot"]
    assert (watcher.store.boot, watcher.store.hz, watcher.store.readonly) == ("boot-1", 2, True)
    assert (watcher.store.requests, watcher.store.children) == (hub.store.requests, hub.store.children)
    assert watcher.store.graph == hub.store.graph
    assert [event.n for event in watcher.store.events] == [1]


def test_many_changes_become_one_delta_with_the_latest_values() -> None:
    hub, _ = make_hub()
    hub.put("requests", "1", request(1, node="LLM"))
    hub.put("edges", "e", EdgeStatus(name="e", items=1, bytes=10))
    subscription = hub.subscribe()
    subscription.frames()
    for tokens in range(1, 100):
        hub.put("requests", "1", request(1, node="LLM", tokens=tokens))
        hub.put("edges", "e", EdgeStatus(name="e", items=1 + tokens, bytes=10))
    (delta,) = subscription.frames()
    assert isinstance(delta, DeltaFrame)
    assert delta.set == {"requests": {"1": {"tokens": 99}}}
    assert delta.add == {"edges": {"e": {"items": 99}}}
    assert subscription.frames() == []


def test_a_counter_that_was_reset_is_set() -> None:
    hub, _ = make_hub()
    hub.put("edges", "e", EdgeStatus(name="e", items=100))
    watcher = Watcher(hub.subscribe())
    watcher.read()
    hub.put("edges", "e", EdgeStatus(name="e", items=3))
    watcher.read()
    assert watcher.store.edges["e"].items == 3


def test_an_equal_object_is_no_change() -> None:
    hub, _ = make_hub()
    hub.put("nodes", "a@0", NodeStatus(name="a", rank=0))
    before = hub.store.rev
    hub.put("nodes", "a@0", NodeStatus(name="a", rank=0))
    hub.head(DeploymentStatus(name="d"))
    assert hub.store.rev == before


def test_an_idle_deployment_sends_a_heartbeat_every_two_seconds() -> None:
    hub, clock = make_hub()
    watcher = Watcher(hub.subscribe())
    watcher.read()
    for _ in range(41):
        clock.now += 0.25
        watcher.read()
    assert watcher.kinds[2:] == ["beat"] * 5


def test_a_blocked_watcher_costs_one_entry_per_object() -> None:
    hub, _ = make_hub()
    for number in range(50):
        hub.put("requests", str(number), request(number))
    frozen = hub.subscribe()
    frozen.frames()
    for number in range(5000):
        hub.put("requests", str(number % 50), request(number % 50, tokens=number))
        hub.put("requests", f"new-{number}", request(number))
        hub.remove("requests", f"new-{number}")
    assert len(frozen.dirty) == 50


def test_a_watcher_that_missed_events_gets_a_resync_and_a_snapshot() -> None:
    hub, _ = make_hub()
    watcher = Watcher(hub.subscribe())
    watcher.read()
    for number in range(EVENTS + 10):
        hub.event(Event(n=number + 1, type="x"))
    hub.put("requests", "1", request(1))
    watcher.read()
    assert watcher.kinds == ["hello", "snapshot", "resync", "snapshot"]
    assert watcher.store.requests == hub.store.requests
    assert watcher.store.events[-1].n == EVENTS + 10


def test_events_are_in_order_between_deltas_and_revisions_never_decrease() -> None:
    hub, _ = make_hub()
    subscription = hub.subscribe()
    revs: list[int] = [frame.rev for frame in subscription.frames()]
    hub.event(Event(n=1, type="a"))
    hub.put("requests", "1", request(1))
    hub.event(Event(n=2, type="b"))
    frames = subscription.frames()
    revs += [frame.rev for frame in frames]
    assert [type(frame) for frame in frames] == [EventFrame, EventFrame, DeltaFrame]
    assert revs == sorted(revs)


def test_parts_that_were_not_selected_are_not_sent() -> None:
    hub, _ = make_hub()
    watcher = Watcher(hub.subscribe(parts=("nodes",)))
    watcher.read()
    hub.put("requests", "1", request(1))
    hub.event(Event(n=1, type="a"))
    watcher.read()
    assert watcher.kinds == ["hello", "snapshot"]
    hub.put("nodes", "a@0", NodeStatus(name="a", rank=0))
    watcher.read()
    assert list(watcher.store.nodes) == ["a@0"]


def test_a_filter_adds_and_removes_requests_as_they_change() -> None:
    hub, _ = make_hub()
    hub.put("requests", "1", request(1, state="queue"))
    watcher = Watcher(hub.subscribe(filter_text="state:queue"))
    watcher.read()
    hub.put("requests", "1", request(1, state="run"))
    hub.put("requests", "2", request(2, state="queue", tokens=3))
    watcher.read()
    assert watcher.store.requests == {"2": request(2, state="queue", tokens=3)}
    hub.put("requests", "1", request(1, state="queue", why="full"))
    watcher.read()
    assert watcher.store.requests["1"].why == "full"


def test_a_filter_on_age_adds_requests_over_time() -> None:
    hub, clock = make_hub()
    hub.put("requests", "1", request(1, started=clock.now))
    watcher = Watcher(hub.subscribe(filter_text="age>2s"))
    watcher.read()
    assert not watcher.store.requests
    clock.now += 3
    watcher.read()
    assert list(watcher.store.requests) == ["1"]


def test_the_filter_applies_before_the_limit_and_the_rest_is_counted() -> None:
    hub, _ = make_hub()
    for number in range(2100):
        hub.put("requests", str(number), request(number, state="queue" if number >= 2090 else "run"))
    everything, queued = Watcher(hub.subscribe()), Watcher(hub.subscribe(filter_text="state:queue"))
    everything.read()
    queued.read()
    assert (len(everything.store.requests), everything.store.truncated) == (2000, {"requests": 100})
    assert (len(queued.store.requests), queued.store.truncated) == (10, {"requests": 0})
    for number in range(150):
        hub.remove("requests", str(number))
    everything.read()
    assert everything.store.requests == hub.store.requests
    assert everything.store.truncated == {"requests": 0}


def test_a_seventeenth_watcher_is_refused_until_one_leaves() -> None:
    hub, _ = make_hub()
    first, *_ = [hub.subscribe() for _ in range(SUBSCRIBERS)]
    with pytest.raises(Unavailable, match="too many"):
        hub.subscribe()
    hub.unsubscribe(first)
    hub.unsubscribe(first)
    hub.subscribe()


@pytest.mark.parametrize("wrong", [{"parts": ("node",)}, {"hz": 0.01}, {"hz": 11}, {"filter_text": "stat:x"}])
def test_an_invalid_watch_is_refused(wrong: dict[str, Any]) -> None:
    hub, _ = make_hub()
    with pytest.raises(UsageError):
        hub.subscribe(**wrong)
    assert hub.watchers == 0


# -- property: all watchers reach the hub's state ------------------------------------------------------------------

KEYS = st.sampled_from(["1", "2", "3", "4"])
ITEMS = {
    "requests": st.builds(
        RequestStatus,
        id=st.just("r"),
        handle=st.integers(0, 3),
        tokens=st.integers(0, 3),
        state=st.sampled_from(["run", "queue"]),
        walks=st.dictionaries(st.just("decode"), st.integers(0, 2)),
    ),
    "edges": st.builds(EdgeStatus, name=st.just("e"), items=st.integers(0, 3), bytes=st.integers(0, 3)),
    "nodes": st.builds(NodeStatus, name=st.just("n"), rank=st.integers(0, 1), step_ms=st.none() | st.floats(0, 9)),
}
ACTIONS = st.one_of(
    *(st.tuples(st.just(part), KEYS, st.none() | items) for part, items in ITEMS.items()),
    st.tuples(st.just("event"), st.none(), st.none()),
    st.tuples(st.just("join"), st.sampled_from(["", "state:run", "!state:run tokens>0"]), st.none()),
    st.tuples(st.just("read"), st.integers(0, 9), st.none()),
)


@settings(max_examples=200)
@given(actions=st.lists(ACTIONS, max_size=40))
def test_every_watcher_reaches_the_state_of_the_hub(actions: list[tuple[str, Any, Any]]) -> None:
    hub, clock = make_hub()
    watchers = [(Watcher(hub.subscribe()), "")]
    number = 0
    for what, key, item in actions:
        clock.now += 0.1
        if what == "event":
            number += 1
            hub.event(Event(n=number, type="x"))
        elif what == "join":
            if hub.watchers < SUBSCRIBERS:
                watchers.append((Watcher(hub.subscribe(filter_text=key)), key))
        elif what == "read":
            watchers[key % len(watchers)][0].read()
        elif item is None:
            hub.remove(what, key)  # type: ignore[arg-type]  # one of PARTS
        else:
            hub.put(what, key, item)  # type: ignore[arg-type]  # one of PARTS
    for watcher, text in watchers:
        watcher.read()
        for part in PARTS:
            if part != "requests":
                assert watcher.store.part(part) == hub.store.part(part)
        assert watcher.store.requests == hub.snapshot(filter_text=text).requests
        assert len(watcher.store.events) == len(hub.store.events)


def test_the_first_frames_are_hello_and_a_snapshot() -> None:
    hub, _ = make_hub()
    hello, snapshot = hub.subscribe().frames()
    assert isinstance(hello, HelloFrame)
    assert isinstance(snapshot, SnapshotFrame)
    assert msgspec.json.decode(encode(BeatFrame(rev=1, t=2.0))) == {"k": "beat", "rev": 1, "t": 2.0}
    assert msgspec.json.decode(encode(ResyncFrame(rev=1))) == {"k": "resync", "rev": 1, "why": "slow"}
