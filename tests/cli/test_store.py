"""State store: frames lead to the same state wherever a reader joins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.errors import TransportError
from mstar_core.observe.frames import (
    PARTS,
    BeatFrame,
    DeltaFrame,
    DeploymentStatus,
    EdgeStatus,
    Event,
    EventFrame,
    Frame,
    HelloFrame,
    NodeStatus,
    RequestStatus,
    ResyncFrame,
    SnapshotFrame,
    encode,
)
from mstar_core.observe.hub import changed_fields
from mstarctl.client.store import Store, decode


def sent(frame: Frame) -> Frame:
    """Return the frame as a reader decodes it."""
    line = encode(frame)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    got = decode(line)
    assert got is not None
    return got


def state(store: Store) -> dict[str, Any]:
    """Return the visible state without events."""
    return {"deployment": store.deployment, "graph": store.graph, **{part: store.part(part) for part in PARTS}}


def joined(rev: int = 5) -> Store:
    store = Store()
    store.apply(sent(HelloFrame(boot="one", rev=rev - 1)))
    requests = {"7": RequestStatus(id="r-7", handle=7, tokens=3)}
    edges = {"hidden@1>0": EdgeStatus(name="hidden", source_rank=1, items=10, bytes=100)}
    store.apply(
        sent(SnapshotFrame(rev=rev, t=1.0, deployment=DeploymentStatus(name="d"), requests=requests, edges=edges))
    )
    return store


def test_set_replaces_only_its_fields() -> None:
    store = joined()
    store.apply(sent(DeltaFrame(rev=6, after=5, t=2.0, set={"requests": {"7": {"node": "talker", "tokens": 4}}})))
    assert store.requests["7"] == RequestStatus(id="r-7", handle=7, tokens=4, node="talker")
    assert (store.rev, store.t) == (6, 2.0)


def test_set_of_an_unknown_key_is_a_new_object() -> None:
    store = joined()
    store.apply(sent(DeltaFrame(rev=6, after=5, t=2.0, set={"nodes": {"llm@0": {"name": "llm", "rank": 0}}})))
    assert store.nodes == {"llm@0": NodeStatus(name="llm", rank=0)}


def test_add_sums_counters_and_del_removes() -> None:
    store = joined()
    add = {"edges": {"hidden@1>0": {"items": 5, "bytes": 50}}}
    store.apply(sent(DeltaFrame(rev=6, after=5, t=2.0, add=add, delete={"requests": ["7", "unknown"]})))
    assert store.edges["hidden@1>0"].items == 15
    assert store.edges["hidden@1>0"].bytes == 150
    assert store.requests == {}


def test_a_missing_delta_is_detected_and_later_ones_are_ignored_until_a_snapshot() -> None:
    store = joined(rev=5)
    before = state(store)
    store.apply(DeltaFrame(rev=9, after=8, t=2.0, delete={"requests": ["7"]}))
    gaps = [store.has_gap]
    assert state(store) == before
    store.apply(SnapshotFrame(rev=10, t=3.0))
    assert [*gaps, store.has_gap] == [True, False]
    assert store.requests == {}


def test_events_and_heartbeats_advance_the_revision_for_the_next_delta() -> None:
    store = joined(rev=5)
    store.apply(sent(EventFrame(rev=6, t=2.0, event=Event(n=1, type="kv.preempt", facts={"pages": 96}))))
    store.apply(sent(BeatFrame(rev=7, t=4.0)))
    store.apply(sent(DeltaFrame(rev=8, after=7, t=5.0, delete={"requests": ["7"]})))
    assert not store.has_gap
    assert store.requests == {}
    assert [(e.type, e.facts) for e in store.events] == [("kv.preempt", {"pages": 96})]


def test_a_new_boot_clears_the_state() -> None:
    store = joined()
    store.apply(HelloFrame(boot="two", rev=0))
    assert store.requests == {}
    assert store.deployment.name == ""


def test_deltas_after_a_resync_wait_for_the_snapshot() -> None:
    store = joined(rev=5)
    store.apply(sent(ResyncFrame(rev=40)))
    store.apply(sent(DeltaFrame(rev=41, after=40, t=2.0, delete={"requests": ["7"]})))
    assert "7" in store.requests
    store.apply(sent(SnapshotFrame(rev=42, t=3.0)))
    store.apply(sent(DeltaFrame(rev=43, after=42, t=3.0, set={"requests": {"8": {"id": "r-8", "handle": 8}}})))
    assert list(store.requests) == ["8"]


def test_unknown_fields_and_frames_of_a_newer_server_are_ignored() -> None:
    store = joined()
    assert decode(b'{"k":"forecast","rev":6}') is None
    line = (
        b'{"k":"delta","rev":6,"after":5,"t":2.0,"mood":"fine","del":{"dreams":["a"]},'
        b'"set":{"requests":{"7":{"tokens":9,"karma":1}},"dreams":{"a":{"b":1}}}}'
    )
    frame = decode(line)
    assert frame is not None
    store.apply(frame)
    assert store.requests["7"].tokens == 9


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'"x"', b'{"k":"delta"}', b'{"k":"event","rev":"a"}'])
def test_a_malformed_line_is_refused(line: bytes) -> None:
    with pytest.raises(TransportError, match="could not be read"):
        decode(line)


def test_an_id_cannot_break_the_line() -> None:
    request = RequestStatus(id="a\n\u2028\x1b]0;x\x07b", handle=1)
    frame = sent(SnapshotFrame(rev=1, t=0.0, requests={"1": request}))
    assert isinstance(frame, SnapshotFrame)
    assert frame.requests["1"].id == request.id


def test_later_frames_do_not_change_a_copy() -> None:
    store = joined()
    picture = store.copy()
    store.apply(DeltaFrame(rev=6, after=5, t=2.0, set={"requests": {"7": {"tokens": 99}}}))
    assert picture.requests["7"].tokens == 3
    assert store.requests["7"].tokens == 99


# -- property: a stream joined anywhere by a snapshot leads to the same state --------------------------------------

KEYS = st.sampled_from(["1", "2", "3"])
REQUESTS = st.builds(
    RequestStatus,
    id=st.text(max_size=3),
    handle=st.integers(0, 9),
    tokens=st.integers(0, 5),
    node=st.sampled_from([None, "llm", "codec"]),
    walks=st.dictionaries(st.sampled_from(["prefill", "decode"]), st.integers(0, 3), max_size=2),
)
EDGES = st.builds(EdgeStatus, name=st.just("e"), items=st.integers(0, 9), bytes=st.integers(0, 99))
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("requests"), KEYS, st.none() | REQUESTS),
        st.tuples(st.just("edges"), KEYS, st.none() | EDGES),
    ),
    max_size=12,
)


def stream(changes: list[tuple[str, str, Any]], start: Store) -> Iterator[DeltaFrame]:
    """Return the deltas between consecutive states; `start` is updated."""
    for part, key, new in changes:
        old = start.part(part).get(key)
        rev = start.rev + 1
        delta = DeltaFrame(rev=rev, after=start.rev, t=float(rev))
        if new is None:
            delta = msgspec.structs.replace(delta, delete={part: [key]})
        elif old is None:
            delta = msgspec.structs.replace(delta, set={part: {key: msgspec.structs.asdict(new)}})
        else:
            fields = changed_fields(old, new)
            add = (
                {name: new_value - getattr(old, name) for name, new_value in fields.items()} if part == "edges" else {}
            )
            where = {part: {key: add or fields}}
            delta = msgspec.structs.replace(delta, **({"add": where} if add else {"set": where}))
        start.apply(delta)
        yield delta


@given(changes=CHANGES, cut=st.integers(0, 12))
def test_any_cut_of_a_stream_rejoined_by_a_snapshot_ends_in_the_same_state(
    changes: list[tuple[str, str, Any]], cut: int
) -> None:
    truth, early, late = Store(), Store(), Store()
    for store in (truth, early):
        store.apply(SnapshotFrame(rev=0, t=0.0))
    for number, delta in enumerate(stream(changes, truth)):
        early.apply(sent(delta))
        if number == cut:
            late.apply(sent(truth.snapshot()))
        elif number > cut:
            late.apply(sent(delta))
    assert not early.has_gap
    assert state(early) == state(truth)
    if len(changes) > cut:
        assert not late.has_gap
        assert state(late) == state(truth)
        assert (late.rev, late.t) == (truth.rev, truth.t)
