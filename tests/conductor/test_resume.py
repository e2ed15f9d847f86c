"""Requests that go on after a death: places of runs, known ids and delivered units reach the workers."""

from __future__ import annotations

import dataclasses

import msgspec

from mstar_core.conductor.conductor import Conductor
from mstar_core.conformance.clock import FakeClock
from mstar_core.messages.life import PeerReady
from mstar_core.messages.requests import NewRequest, Resume, SavedLoop
from mstar_core.messages.tensors import InlineTensor
from mstar_core.messages.work import OpenRequest, RunWalks, WalkDone
from mstar_core.plugin import ModelSpec
from tests.conductor.test_conductor import MODEL, placed, request
from tests.fakes.courier import FakeCourier

IDS = {"talk:0/lm": [4], "talk:1/loop": [5, 6, 7], "talk:10/loop": [9]}


STATE = SavedLoop(iteration=8, values={"x": InlineTensor(dtype="uint8", shape=(1,), data=b"7")})


def places(model: ModelSpec, message: NewRequest, ranks: tuple[int, int] = (0, 1)) -> dict[str, str]:
    """Play a whole request; return walk -> place."""
    post = FakeCourier()
    conductor = Conductor(model, placed((ranks[0],), codec=ranks[1]), post, max_seq_len=64, clock=FakeClock())
    for rank in ranks:
        conductor.on(PeerReady(name=f"worker-{rank}", incarnation=1))
    conductor.on(message)
    seen: dict[str, str] = {}
    while sent := post.take():
        for name, each in sent:
            for run in each.runs if isinstance(each, RunWalks) else ():
                seen[run.walk] = run.place
                if run.walk != "chunks":
                    conductor.on(WalkDone(handle=message.handle, run=run.run, rank=int(name[-1])))
    return seen


def journaled(**changes: object) -> NewRequest:
    return msgspec.structs.replace(request(), is_journaled=True, **changes)


def test_places_count_the_runs_of_a_partition_in_any_order_of_partitions() -> None:
    turned = dataclasses.replace(MODEL, partitions=MODEL.partitions[::-1])
    expected = {"prefill": "talk:0", "decode": "talk:1", "chunks": "sing:0"}
    assert places(MODEL, journaled()) == places(turned, journaled(handle=7), ranks=(1, 0)) == expected


def test_a_request_without_a_journal_has_no_places() -> None:
    assert set(places(MODEL, request()).values()) == {""}


def test_known_ids_and_saved_states_go_to_their_run_and_delivered_units_to_every_rank() -> None:
    post = FakeCourier()
    conductor = Conductor(MODEL, placed((0,), codec=1), post, max_seq_len=64, clock=FakeClock())
    for rank in (0, 1):
        conductor.on(PeerReady(name=f"worker-{rank}", incarnation=1))
    conductor.on(journaled(resume=Resume(attempt=2, ids=IDS, delivered={"pcm": 12}, saved={"talk:1/loop": STATE})))
    sent = [message for _, message in post.take()]
    assert [message.delivered for message in sent if isinstance(message, OpenRequest)] == [{"pcm": 12}] * 2
    assert [run.known for message in sent if isinstance(message, RunWalks) for run in message.runs] == [{"lm": [4]}, {}]
    assert not any(run.saved for message in sent if isinstance(message, RunWalks) for run in message.runs)
    conductor.on(WalkDone(handle=1, run=1, rank=0))
    [(_, walks)] = post.take()
    assert [run.known for run in walks.runs] == [{"loop": [5, 6, 7]}]
    assert [run.saved for run in walks.runs] == [{"loop": STATE}]
