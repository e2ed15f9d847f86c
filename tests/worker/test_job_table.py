"""Descriptions of loops for the engine: what leaves the process, what feeds them, and what happens after the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mstar_core.engine.base import JobKey, LoopSpec
from mstar_core.errors import EngineError
from mstar_core.graph import FixedChunk, Stream
from mstar_core.graph.compile.wiring import compile_graph
from mstar_core.worker.job_table import feeder, leaving_ports, loop_spec
from mstar_core.worker.state.stream_inbox import StreamInbox
from mstar_core.worker.state.walks import resident_loops
from tests.engine.tiny_talker import PORTS
from tests.fakes.runner import FakeRunner
from tests.fakes.talk_model import LAST_CODE, SPEC, STOP, TEXT

WALKS = {name: walk for partition in SPEC.partitions for name, walk in partition.walks.items()}
COMPILED = compile_graph(WALKS, SPEC.streams)


def described(walk: str, rank: int = 0, limit: int | None = 9, **homes: int) -> LoopSpec:
    request: Any = SimpleNamespace(outputs=("text", "audio"), homes={"writer": 0, "speaker": 0, "codec": 0, **homes})
    compiled = COMPILED[walk]
    leaving = leaving_ports(request, compiled.tasks[0], rank)
    return loop_spec(compiled.loops[0], compiled.tasks[0], limit, {}, leaving)


def test_a_loop_whose_ids_go_to_a_client_and_a_stream_emits_nothing_else() -> None:
    """So its steps are captured, and no port is copied: the ids come with each step anyway."""
    for homes in ({}, {"speaker": 1}):
        spec = described("write", **homes)
        assert spec == LoopSpec(max_iters=9, carry={"token": "token"}, stop_port="token", stop_ids=(STOP,))
    assert COMPILED["write"].loops[0].runs_in_engine


def test_a_loop_over_a_stream_of_ids_is_fed() -> None:
    carry = {"code0": "code0", "last_hidden": "last_hidden", "text_ended": "text_ended"}
    wanted = LoopSpec(
        max_iters=9,
        carry=carry,
        stop_port="code0",
        stop_ids=(LAST_CODE,),
        emit=("frame",),
        feed="text",
        after_end="empty",
        is_read=False,
    )
    assert described("speak") == wanted, "nothing takes its ids as they come"
    assert described("speak", codec=1) == replace(wanted, host_emit=("frame",))
    assert resident_loops(SPEC) == {"speaker": PORTS}


def test_a_loop_without_limit_or_stop_rule_ends_with_its_stream() -> None:
    loop = COMPILED["speak"].loops[0]
    endless = replace(loop, loop=replace(loop.loop, stop=None))
    assert loop_spec(endless, COMPILED["speak"].tasks[0], None, {}).after_end == "stop"
    assert loop_spec(endless, COMPILED["speak"].tasks[0], 5, {}).after_end == "empty"


def test_a_runner_without_feeds_is_refused() -> None:
    runner = FakeRunner("speaker", lambda job: {})
    with pytest.raises(EngineError, match="takes no stream"):
        feeder(runner, JobKey(1))


class Taken:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.calls = 0
        self.has_ended = False

    def __call__(self, ids: Sequence[int], ended: bool) -> None:
        self.calls += 1
        self.ids += ids
        self.has_ended = self.has_ended or ended


def inbox(stream: Stream = TEXT) -> StreamInbox:
    return StreamInbox(stream, stream.chunk, flush=False)


def test_a_loop_in_the_engine_gets_waiting_ids_in_bulk_and_later_ones_as_they_come() -> None:
    box, taken = inbox(), Taken()
    for value in (1, 2, STOP, 3):
        box.take_id(value)
    assert box.pop() is not None
    box.feed(taken)
    assert (taken.ids, taken.calls, box.received) == ([2, 3], 1, 4)
    assert box.take_id(4)
    box.hand_over()
    box.end(5)
    box.hand_over()
    assert (taken.ids, taken.has_ended) == ([2, 3, 4], True)


def test_ids_that_a_loop_did_not_use_stay_for_the_next_walk() -> None:
    box, taken = inbox(replace(TEXT, reject=())), Taken()
    for value in range(400):
        box.take_id(value)
    box.feed(taken)
    assert taken.ids == [*range(400)]
    box.end_feed(397)
    box.take_id(400)
    assert len(taken.ids) == 400
    box.end(401)
    left = []
    while (popped := box.pop()) is not None:
        left += popped[1].tolist()
    assert left == [397, 398, 399, 400] and box.is_finished


def test_iterations_after_the_end_use_no_ids() -> None:
    box, taken = inbox(), Taken()
    box.take_id(7)
    box.end(1)
    box.feed(taken)
    assert taken.has_ended
    box.end_feed(30)
    assert box.is_finished and box.pop() is None


def test_rejected_ids_enter_no_chunk() -> None:
    box = inbox(replace(TEXT, chunk=FixedChunk(2), accept=range(5), reject=(2, 3)))
    for value in (1, 2, 3, 9, 4):
        box.take_id(value)
    popped = box.pop()
    assert popped is not None and popped[1].tolist() == [1, 4]
