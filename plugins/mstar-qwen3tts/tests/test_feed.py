"""A text that arrives while it is spoken: the same frames as of the whole text, whatever its pieces and their pace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mstar_core.config.deployment import NodePlacement, Plan, RankPlan
from mstar_core.conformance.fake_api import RequestOutcome, SampleRequest, SentRequest
from mstar_core.conformance.nodes import BuiltNode, RuntimeSettings, build_nodes
from mstar_core.conformance.runtime import LocalRuntime, ended
from mstar_core.messages.requests import GrowingInput, Resume
from mstar_core.plugin.spec import ModelSpec
from mstar_qwen3tts.checkpoint.config import read_config
from mstar_qwen3tts.plugin import mstar_models
from mstar_qwen3tts.processor import Processor
from mstar_qwen3tts.program import LIVE

from .golden_set import CASES, FOLDER, Case
from .test_served_golden import PCM, request

FOLDER_NAME = "custom_voice"
STREAMED = [
    case
    for case in map(Case, CASES)
    if case.folder.name == FOLDER_NAME and case.kind is None and case.call.get("non_streaming_mode") is False
]
PLACE = "Talker:1/talker_loop"
"""Place of the talker's loop in a journal."""


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    (spec,) = (spec for spec in mstar_models() if spec.name == "qwen3_tts")
    return spec.bound(FOLDER / FOLDER_NAME, {})


@pytest.fixture(scope="module")
def built(model: ModelSpec) -> dict[str, BuiltNode]:
    return build_nodes(model, FOLDER / FOLDER_NAME)


@pytest.fixture(params=STREAMED, ids=lambda case: case.name)
def streamed(request: pytest.FixtureRequest) -> Case:
    case: Case = request.param
    return case


def opened(ids: list[int], case: Case, growing: GrowingInput | None = None) -> SampleRequest:
    """Return the request of a text that begins with some ids. Each frame sounds at once, so its ids are reported."""
    whole, values = request(case), growing or GrowingInput()
    params = {**whole.params, "codec_chunk_frames": 1}
    return replace(whole, text="", is_open=True, ids=ids, params=params, growing={LIVE: values}, is_journaled=True)


def pieces_of(case: Case, size: int, text: str = "") -> list[list[int]]:
    """Return the ids of a text, by default the case's, that arrives in pieces of so many characters, but empty ones."""
    reader, text = Processor(case.folder, {}).text_reader(), text or case.call["text"]
    found = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
    return [ids for ids in (*found, reader.end()) if ids]


def iterations(call: SentRequest) -> int:
    """Return the iterations of the talker's loop so far."""
    return len(call.drawn.get(PLACE, ())) // call.widths.get(PLACE, 1)


def check(case: Case, outcome: RequestOutcome) -> None:
    """Compare with the reference, which has read the whole text along."""
    assert outcome.status == "finished", outcome.cause
    pcm = np.concatenate(outcome.of("pcm")).astype(np.int32)
    expected = (case.tensors["waveform"].flatten().numpy() * 32767).round().astype(np.int32)
    assert abs(pcm - expected).max() <= PCM


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_slow_text_is_spoken_like_the_whole_one(
    streamed: Case, size: int, ranks: int, model: ModelSpec, built: dict[str, BuiltNode]
) -> None:
    runtime = LocalRuntime(model, streamed.folder, ranks=ranks, built=built)
    first, *rest = pieces_of(streamed, size)
    call = runtime.send(opened(first, streamed))
    for ids in rest:
        runtime.grow(call, LIVE, ids)
        assert not call.is_over
    runtime.grow(call, LIVE, (), is_over=True)
    runtime.run()
    check(streamed, ended(call))
    assert not runtime.leaks()


def test_speech_waits_for_its_text(streamed: Case, model: ModelSpec, built: dict[str, BuiltNode]) -> None:
    """Each frame but the first reads an id. Without one no frame is made, and no padding is read in its place."""
    runtime = LocalRuntime(model, streamed.folder, built=built)
    ids = [each for piece in pieces_of(streamed, 1000) for each in piece]
    call = runtime.send(opened(ids[:1], streamed))
    for number, each in enumerate(ids[1:3], start=1):
        runtime.grow(call, LIVE, [each])
        runtime._turn_until_idle()
        assert iterations(call) == number
    runtime.cancel(call)
    runtime.run()
    assert not runtime.leaks()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_frames_of_a_text_that_pauses_are_heard_before_their_piece_is_whole(
    is_resumed: bool, ranks: int, model: ModelSpec, built: dict[str, BuiltNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the client has played what it has, and not before: larger pieces cost less."""
    monkeypatch.setattr("mstar_core.worker.executor.EARLY_S", -10.0)
    case = STREAMED[0]
    whole = request(case)
    whole = replace(whole, text=LONG, params={**whole.params, "max_output_tokens": FRAMES, "ignore_eos": True})
    (expected,) = LocalRuntime(model, case.folder, built=built).ask(whole)
    runtime = LocalRuntime(model, case.folder, ranks=ranks, built=built)
    ids = [each for piece in pieces_of(case, 1000, LONG) for each in piece]
    ask = replace(whole, text="", is_open=True, ids=ids[:1], growing={LIVE: GrowingInput()}, is_journaled=True)
    call = runtime.send(ask)
    runtime.grow(call, LIVE, ids[1:6])
    runtime._turn_until_idle()
    if is_resumed:
        drawn = {place: list(found) for place, found in call.drawn.items()}
        runtime.cancel(call)
        runtime.run()
        again = replace(ask, growing={LIVE: GrowingInput(values=ids[1:6])}, resume=Resume(attempt=2, ids=drawn))
        call = runtime.send(again)
        runtime._turn_until_idle()
    assert frames_of(call, case) == 3  # pieces of one and of two frames
    runtime.clock.sleep(20.0)
    runtime._turn_until_idle()
    assert frames_of(call, case) == 5
    runtime.grow(call, LIVE, ids[6:], is_over=True)
    runtime.run()
    assert_same_sound(ended(call), expected)
    assert not runtime.leaks()


def assert_same_sound(found: RequestOutcome, expected: RequestOutcome) -> None:
    """Compare samples. How the codec's convolutions round depends on the pieces, which follow the pace of the text."""
    one, other = (np.concatenate(each.of("pcm")).astype(np.int32) for each in (found, expected))
    assert one.shape == other.shape and one.size and abs(one - other).max() <= 1


def frames_of(call: SentRequest, case: Case) -> int:
    """Return the frames whose sound the client has."""
    return (
        sum(item.array.size for item in call.items if item.port == "pcm")
        // read_config(case.folder).codec.frame_samples
    )


@pytest.mark.parametrize("known", [1, 2])
def test_an_attempt_after_a_death_goes_on_with_the_same_text(
    streamed: Case, known: int, model: ModelSpec, built: dict[str, BuiltNode]
) -> None:
    """The second attempt gets the ids so far at once, also those that the first one has not read."""
    runtime = LocalRuntime(model, streamed.folder, built=built)
    ids = [each for piece in pieces_of(streamed, 1000) for each in piece]
    call = runtime.send(opened(ids[:1], streamed))
    runtime.grow(call, LIVE, ids[1 : 1 + known])
    runtime._turn_until_idle()
    drawn = {place: list(found) for place, found in call.drawn.items()}
    assert iterations(call) == known
    runtime.cancel(call)
    runtime.run()
    rest = ids[1 : known + 2]
    again = opened(ids[:1], streamed, GrowingInput(values=list(rest)))
    call = runtime.send(replace(again, resume=Resume(attempt=2, ids=drawn)))
    runtime.grow(call, LIVE, ids[1 + len(rest) :], is_over=True)
    runtime.run()
    check(streamed, ended(call))


LONG = "Hello there, it's seven o'clock. How are you today, and what will you do tomorrow?"
FRAMES = 30


@pytest.mark.parametrize("plan", [None, "moves"])
def test_a_long_text_is_spoken_like_the_whole_one(
    plan: str | None, streamed: Case, model: ModelSpec, built: dict[str, BuiltNode]
) -> None:
    """Also if the cache moves from the rank that reads prompts to the one that speaks."""
    whole = replace(request(streamed), text=LONG)
    whole = replace(whole, params={**whole.params, "max_output_tokens": FRAMES, "ignore_eos": True})
    (expected,) = LocalRuntime(model, streamed.folder, built=built).ask(whole)
    runtime = LocalRuntime(model, streamed.folder, built=built, plan=None if plan is None else MOVES)
    first, *rest = pieces_of(streamed, 7, LONG)
    open_text = replace(whole, text="", is_open=True, ids=first, growing={LIVE: GrowingInput()})
    call = runtime.send(open_text)
    for ids in rest:
        runtime.grow(call, LIVE, ids)
    runtime.grow(call, LIVE, (), is_over=True)
    runtime.run()
    assert ended(call).status == "finished", ended(call).cause
    assert_same_sound(ended(call), expected)
    assert ended(call).counts["talker_loop"] == FRAMES and not runtime.leaks()


MOVES = Plan(
    ranks=(
        RankPlan(rank=0, device="cpu", nodes=("TextFeed", "Talker", "Codec")),
        RankPlan(rank=1, device="cpu", nodes=("Talker",)),
    ),
    placements=(
        NodePlacement(node="TextFeed", replicas=((0,),)),
        NodePlacement(node="Talker", replicas=((0,),), walks=("talker_prefill",)),
        NodePlacement(node="Talker", replicas=((1,),), walks=("talker_decode",)),
        NodePlacement(node="Codec", replicas=((0,),)),
    ),
)
"""Prompts are read on another rank than the one that speaks."""


def test_texts_that_wait_give_their_pages_to_others(
    streamed: Case, model: ModelSpec, built: dict[str, BuiltNode]
) -> None:
    """With memory for about one speech, two that wait for text and one whole text all come to their ends."""
    whole = replace(request(streamed), text=LONG)
    whole = replace(whole, params={**whole.params, "max_output_tokens": FRAMES, "ignore_eos": True})
    (expected,) = LocalRuntime(model, streamed.folder, built=built).ask(whole)
    runtime = LocalRuntime(model, streamed.folder, RuntimeSettings(pages=4), built=built)
    first, *rest = pieces_of(streamed, 7, LONG)
    calls = [
        runtime.send(replace(whole, text="", is_open=True, ids=first, growing={LIVE: GrowingInput()})) for _ in "ab"
    ]
    for ids in rest[:4]:
        for call in calls:
            runtime.grow(call, LIVE, ids)
    other = runtime.send(whole)
    runtime._turn_until_idle()
    assert other.is_over and not any(call.is_over for call in calls)
    for call in calls:
        for ids in rest[4:]:
            runtime.grow(call, LIVE, ids)
        runtime.grow(call, LIVE, (), is_over=True)
    runtime.run()
    for call in (other, *calls):
        assert ended(call).status == "finished", ended(call).cause
        assert_same_sound(ended(call), expected)


@pytest.mark.parametrize("text", ["", LONG], ids=["shorter than the recording", "longer than the recording"])
def test_a_text_that_arrives_is_spoken_on_from_a_recording(text: str) -> None:
    """The request begins once the ids beside the recording's frames are known, with the prompt of the whole text."""
    case = next(case for case in map(Case, CASES) if case.is_clone and case.call.get("ref_text") and case.kind is None)
    (spec,) = (spec for spec in mstar_models() if spec.name == "qwen3_tts_base")
    runtime = LocalRuntime(spec.bound(case.folder, {}), case.folder)
    whole = request(case)
    if text:
        whole = replace(whole, text=text, params={**whole.params, "max_output_tokens": FRAMES, "ignore_eos": True})
    (expected,) = runtime.ask(whole)
    ids = [each for piece in pieces_of(case, 5, text) for each in piece]
    ask = replace(whole, text="", is_open=True, ids=ids[:1], growing={LIVE: GrowingInput()})
    needed = runtime.api.prepared(ask)[2].needs_ids
    assert needed > 1 and (needed < len(ids)) == bool(text)
    assert runtime.api.prepared(replace(ask, ids=ids[: needed - 1]))[2].needs_ids == (needed if text else 0)
    first, rest = ids[:needed], ids[needed:]
    call = runtime.send(replace(ask, ids=first))
    for each in rest:
        runtime.grow(call, LIVE, [each])
    runtime.grow(call, LIVE, (), is_over=True)
    runtime.run()
    assert ended(call).status == "finished", ended(call).cause
    assert_same_sound(ended(call), expected)
    assert not runtime.leaks()
