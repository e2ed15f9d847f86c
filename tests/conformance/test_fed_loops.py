"""A model whose speech follows its text by a stream of ids, through the conductor, workers and engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar_core.conformance.fake_api import RequestOutcome, SampleRequest
from mstar_core.conformance.nodes import RuntimeSettings, build_nodes
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.graph.declare.sampling import SamplingParams
from tests.engine.tiny_engine import VOCAB
from tests.engine.tiny_engine import reference as written
from tests.engine.tiny_talker import GROUPS, Speech
from tests.engine.tiny_talker import reference as spoken
from tests.fakes.talk_model import LAST_CODE, SPEC, STOP, WRITER

BOTH = ("text", "audio")
FOUND: dict[str, tuple[list[int], list[list[int]]]] = {}
BUILT = build_nodes(SPEC, Path())
ASKS = tuple(
    SampleRequest(text=text, params=params, outputs=BOTH, seed=seed, name=text)
    for text, params, seed in (
        ("hello", {}, 7),
        ("how are you", {"frames": 30, "voice": 2, "heat": 0.6}, 8),
        ("a", {"words": 1, "frames": 5}, 9),
        ("and a longer text", {"words": 20, "frames": 9, "first": 1}, 7),
    )
)


def runtime(ranks: int = 1, **settings: Any) -> LocalRuntime:
    slow = [("worker-0", "worker-1")] if ranks > 1 else []
    sizes = RuntimeSettings(page_size=4, max_seq_len=96, **settings)
    return LocalRuntime(SPEC, Path(), sizes, ranks=ranks, slow=slow, built=BUILT)


def words(outcome: RequestOutcome) -> list[int]:
    return [int(value) for array in outcome.of("token") for value in array.reshape(-1)]


def pieces(outcome: RequestOutcome) -> list[list[list[int]]]:
    return [np.asarray(array).reshape(-1, GROUPS).tolist() for array in outcome.of("pcm")]


def expected(ask: SampleRequest) -> tuple[list[int], list[list[int]]]:
    """Ids and frames by the references of the engine tests."""
    if ask.name not in FOUND:
        FOUND[ask.name] = by_reference(ask)
    return FOUND[ask.name]


def by_reference(ask: SampleRequest) -> tuple[list[int], list[list[int]]]:
    given = {"words": 12, "frames": 16, "voice": 1, "heat": 1.0, **ask.params}
    ids = [value % VOCAB for value in (ask.text or "").encode()]
    text = written(ids, given["words"] - 1) if given["words"] > 1 else written(ids, 1)[:1]
    text = text[: text.index(STOP) + 1] if STOP in text else text
    said = [value for value in text if value != STOP]
    if not said:
        return text, []
    speech = Speech(
        first=said[0],
        text=tuple(said[1:]),
        steps=given["frames"],
        stop=LAST_CODE,
        voice=given["voice"],
        heat=given["heat"],
        sampling=SamplingParams(temperature=0.8, seed=ask.seed),
    )
    return text, spoken(speech, name="speaker")[1]


@pytest.mark.parametrize(
    ("ranks", "settings"), [(1, {}), (1, {"lookahead": 1}), (2, {}), (3, {"lookahead": 1}), (2, {"pages": 24})], ids=str
)
def test_speech_follows_the_text_wherever_its_nodes_run(ranks: int, settings: dict[str, Any]) -> None:
    bench = runtime(ranks, **settings)
    alone = [bench.ask(ask)[0] for ask in ASKS]
    together = bench.ask(*ASKS, *ASKS[1:], *ASKS[1:])
    for outcomes in (alone, together):
        for ask, outcome in zip((*ASKS, *ASKS[1:], *ASKS[1:]), outcomes, strict=False):
            text, frames = expected(ask)
            assert outcome.status == "finished", outcome.cause
            assert words(outcome) == text and [frame for piece in pieces(outcome) for frame in piece] == frames
            first = int(ask.params.get("first", 2))
            if len(frames) >= first + 4:
                assert [len(piece) for piece in pieces(outcome)][:2] == [first, 4]
    if "pages" in settings:
        assert any(runner.memory().preempted for worker in bench.workers for runner in worker.runners.values())
    assert bench.leaks() == []


def test_text_alone_starts_no_speech() -> None:
    bench = runtime(2)
    outcome = bench.ask(replace(ASKS[0], outputs=("text",)))[0]
    assert words(outcome) == expected(ASKS[0])[0] and pieces(outcome) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_answer_without_words_ends_without_sound_or_error(ranks: int) -> None:
    bench = runtime(ranks)
    ask = next(
        SampleRequest(text=text, outputs=BOTH) for text in map(chr, range(32, 127)) if expected_first(text) == STOP
    )
    outcome, other = bench.ask(ask, ASKS[0])
    assert (outcome.status, words(outcome), pieces(outcome)) == ("finished", [STOP], [])
    assert [frame for piece in pieces(other) for frame in piece] == expected(ASKS[0])[1]
    assert bench.leaks() == []


def expected_first(text: str) -> int:
    return written([ord(text) % VOCAB], 1)[0]


@pytest.mark.parametrize("turns", [3, 8, 14, 20])
def test_a_cancelled_request_leaves_nothing_behind(turns: int) -> None:
    bench = runtime(2)
    call = bench.send(ASKS[1])
    other = bench.send(ASKS[0])
    for _ in range(turns):
        bench.step()
    bench.cancel(call)
    bench.run()
    assert other.outcome is not None
    assert [frame for piece in pieces(other.outcome) for frame in piece] == expected(ASKS[0])[1]
    assert bench.leaks() == []


def test_the_writer_decodes_in_its_batch_although_its_ids_go_to_two_places() -> None:
    """Its ids go to the client and to the speaker; its loop is resident, and emits nothing beside them."""
    bench = runtime(1)
    bench.ask(*ASKS)
    runner = bench.workers[0].runners[WRITER.name]
    statistics = bench.workers[0].steps.statistics[WRITER.name]
    assert statistics.steps < 2 * max(len(expected(ask)[0]) for ask in ASKS), "not one step per sequence"
    assert runner.memory().slots_used == 0
