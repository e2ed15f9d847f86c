"""Drawn ids reach the api no later than what they determine, and a new attempt reports none that it was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mstar_core.graph.declare.nodes import NodeSpec
from mstar_core.messages.flow import Drawn, Outputs, StreamItems
from mstar_core.messages.tensors import InlineTensor
from mstar_core.messages.work import OpenRequest
from mstar_core.transport.tensors import inline
from mstar_core.worker.journal import INTERVAL_S, PendingDraws
from tests.fakes.runner import FakeRunner
from tests.worker.test_executor import STOP, Bench, ids, windows

SPEECH = [*ids(70), STOP]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class JournalBench(Bench):
    """A bench whose loops take known ids, with a clock for the journal."""

    def __init__(self, *scripts: Any, **more: Any) -> None:
        super().__init__(*scripts, **more)
        self.clock = Clock()
        self.outbox.journal = PendingDraws(self.clock)

    def walk(self, handle: int, partition: str, run: int, walk: str, **fields: Any) -> None:
        number = {"prefill": 0, "decode": 1}.get(walk, 0)
        super().walk(handle, partition, run, walk, place=f"{partition}:{number}", **fields)

    @property
    def drawn(self) -> list[Drawn]:
        return [drawn for message in self.post.of(Outputs) for drawn in message.drawn]


@pytest.fixture(autouse=True)
def runners_that_take_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRunner, "journal_ports", lambda self, loop: ())


def prompt() -> InlineTensor:
    return inline(np.arange(5))


def test_every_id_is_reported_once_by_place_and_number() -> None:
    bench = JournalBench({1: SPEECH})
    bench.open(1)
    bench.speak(1)
    places: dict[str, list[int]] = {}
    for drawn in bench.drawn:
        assert (drawn.handle, drawn.width, drawn.start) == (1, 1, len(places.setdefault(drawn.place, [])))
        places[drawn.place] += drawn.ids
    assert places == {"LLM:0/LLM": SPEECH[:1], "LLM:1/decode_loop": SPEECH[1:]}


def test_ids_come_with_or_before_the_outputs_that_they_determine() -> None:
    bench = JournalBench({1: SPEECH})
    bench.open(1)
    bench.speak(1)
    count = sent = 0
    for message in bench.post.of(Outputs):
        count += sum(len(drawn.ids) for drawn in message.drawn)
        sent += len(message.items)
        assert not sent or count >= 28 + 7 * (sent - 1)
    assert sent == len(windows(ids(70)))


def test_ids_leave_before_stream_items_for_another_rank() -> None:
    bench = JournalBench({1: SPEECH}, nodes=("LLM",))
    bench.open(1, homes={"LLM": 0, "snac_decoder": 1})
    bench.walk(1, "LLM", 2, "prefill", inputs={"tokens": prompt()})
    bench.turns()
    bench.walk(1, "LLM", 3, "decode", max_iters=99)
    bench.turns()
    journaled: list[int] = []
    streamed = 0
    for _, message in bench.post.sent:
        if isinstance(message, Outputs):
            journaled += [value for drawn in message.drawn for value in drawn.ids]
        if isinstance(message, StreamItems):
            streamed += len(message.ids)
            assert journaled[:streamed] == SPEECH[:streamed]
    assert streamed == len(SPEECH)


def test_ids_wait_for_a_message_or_a_quarter_of_a_second() -> None:
    bench = JournalBench({1: SPEECH})
    log, known = bench.outbox.journal.of_draw(1, "LLM:0/LLM", 0, [])
    log.drew(5)
    bench.outbox.flush()
    assert known is None and not bench.post.sent
    bench.clock.now = INTERVAL_S - 0.01
    assert bench.outbox.journal.wait_s == pytest.approx(0.01)
    bench.outbox.flush()
    assert not bench.post.sent
    bench.clock.now = INTERVAL_S
    bench.outbox.flush()
    assert [drawn.ids for drawn in bench.drawn] == [[5]]
    bench.outbox.flush()
    assert len(bench.post.sent) == 1 and not bench.outbox.journal.is_waiting


def test_given_ids_are_not_reported() -> None:
    bench = JournalBench({1: SPEECH})
    bench.open(1)
    bench.walk(1, "SNAC", 1, "snac_chunk")
    bench.walk(1, "LLM", 2, "prefill", inputs={"tokens": prompt()}, known={"LLM": SPEECH[:1]})
    bench.turns()
    bench.walk(1, "LLM", 3, "decode", max_iters=99, known={"decode_loop": SPEECH[1:41]})
    bench.turns()
    prefill, decode = bench.lm.seen
    assert prefill.known == SPEECH[0] and decode.loop is not None and decode.loop.known == tuple(SPEECH[1:41])
    assert {drawn.place for drawn in bench.drawn} == {"LLM:1/decode_loop"} and bench.drawn[0].start == 40
    assert [value for drawn in bench.drawn for value in drawn.ids] == SPEECH[41:]


def test_candidates_have_no_journal() -> None:
    bench = JournalBench({1: SPEECH})
    bench.open(1)
    bench.walk(1, "LLM", 2, "prefill", inputs={"tokens": prompt()}, rows=3, known={"LLM": SPEECH[:1]})
    bench.turns()
    assert bench.lm.seen[0].known is None and not bench.drawn


def test_whole_iterations_are_kept_with_the_values_of_their_ports() -> None:
    journal = PendingDraws(Clock())
    node = NodeSpec(name="Talker", engine="kv_cache", ports={"frame": "i64[2]"})
    log, known = journal.of_loop(3, "T:0/loop", 6, [1, 2, 3, 4, 5, 6, 7, 8], node, ("frame",))
    assert (known, log.width, log.start) == ((1, 2, 3, 4, 5, 6), 3, 12)
    for number in range(4):
        log.drew(10 + number)
        log.emitted({"frame": torch.tensor([20 + number, 30 + number])})
    assert journal.take() == [Drawn(handle=3, place="T:0/loop", start=12, ids=[12, 22, 32, 13, 23, 33], width=3)]


def test_outputs_that_the_api_has_are_left_out_and_counted() -> None:
    whole = JournalBench({1: SPEECH})
    whole.open(1)
    whole.speak(1)
    bench = JournalBench({1: SPEECH})
    homes = {"LLM": 0, "snac_decoder": 0}
    delivered = {"pcm": 2 * 28 + 5}
    bench.executor.open(
        OpenRequest(handle=1, params={}, seed=1, homes=homes, max_tokens=100, outputs=["audio"], delivered=delivered)
    )
    bench.speak(1)
    assert bench.pcm(1) == whole.pcm(1)[2:]
    items = [item for message in bench.post.of(Outputs) for item in message.items]
    assert [item.skipped for item in items] == [2 * 28] + [0] * (len(items) - 1)


def test_chunks_whose_outputs_the_api_has_are_not_computed_again() -> None:
    whole = JournalBench({1: SPEECH})
    whole.open(1)
    whole.speak(1)
    bench = JournalBench({1: SPEECH})
    bench.executor.open(
        OpenRequest(
            handle=1,
            params={},
            seed=1,
            homes={"LLM": 0, "snac_decoder": 0},
            max_tokens=100,
            outputs=["audio"],
            delivered={"pcm": 3 * 28},
            chunks={"pcm": (2, 2 * 28)},
        )
    )
    bench.speak(1)
    assert bench.pcm(1) == whole.pcm(1)[3:], "two are left out before, one after it was computed"
    items = [item for message in bench.post.of(Outputs) for item in message.items]
    assert [item.skipped for item in items] == [3 * 28] + [0] * (len(items) - 1)
    computed, all_of_them = (len(each.snac.seen) for each in (bench, whole))
    assert computed == all_of_them - 2
