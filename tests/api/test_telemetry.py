"""Request telemetry: each change once, the complete state at the end, and bounded memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mstar_core.api import telemetry as module
from mstar_core.api.requests.registry import LiveRequest
from mstar_core.api.telemetry import RequestTelemetry
from mstar_core.conformance.clock import FakeClock


def live(handle: int = 7) -> Any:
    return LiveRequest(handle=handle, request_id=f"r-{handle}", route="generate", key="", started=10.0, deadline=1e9)


ORDER = [("text", 0), ("audio", 0), ("text", 1)]
CALL: Any = SimpleNamespace(order=ORDER, media=(), outputs=("text", "audio"), loop=None, parent="", group="")


def encoded(**facts: Any) -> Any:
    """Return the counts of a request's outputs."""
    none = {"first_at": None, "first_sound_at": None, "samples": 0, "audio_seconds": 0.0}
    return SimpleNamespace(**{**none, "images": 0, "video_seconds": 0.0, **facts})


def test_outputs_and_inputs_that_are_paid_for_are_reported() -> None:
    feed, request = RequestTelemetry(FakeClock(10.0)), live()
    feed.opened(request, CALL)
    request.encoder, request.heard_s = encoded(images=2, video_seconds=1.5, samples=24000, audio_seconds=1.0), 3.25
    feed.ended(request, "finished", "")
    (news,), _ = feed.take()
    assert (news.images, news.video_s, news.audio_s, news.audio_in_s) == (2, 1.5, 1.0, 3.25)
    assert news.parent is None


@pytest.mark.parametrize(
    ("route", "request_id", "facts", "parent"),
    [
        ("generate", "r/1", {"group": "r"}, "r"),
        ("video", "video_1", {"parent": "r"}, "r"),
        ("realtime", "call-9-3", {}, "call-9"),
        ("robot_policy", "arm-12", {}, "arm"),
        ("generate", "r-1", {}, None),
    ],
)
def test_a_part_names_the_request_that_it_belongs_to(
    route: str, request_id: str, facts: dict[str, str], parent: str | None
) -> None:
    feed, request = RequestTelemetry(FakeClock(10.0)), live()
    request.route, request.request_id = route, request_id
    feed.opened(request, SimpleNamespace(**{**vars(CALL), **facts}))  # type: ignore[arg-type]  # the fields that it reads
    ((news,), _) = feed.take()
    assert news.parent == parent


def test_a_request_is_told_of_when_something_is_new_and_not_otherwise() -> None:
    clock = FakeClock(10.0)
    feed, request = RequestTelemetry(clock, lambda: "all 2 slots are taken"), live()
    feed.opened(request, CALL)
    (first,), spans = feed.take()
    assert (first.id, first.inputs, first.outputs, first.state) == (
        "r-7",
        ["text", "audio"],
        ["text", "audio"],
        "prepare",
    )
    assert spans == [] and feed.take() == ([], [])

    clock.now, request.state = 10.5, "queued"
    feed.prepared(request)
    (queued,), (prepared,) = feed.take()
    assert (queued.state, queued.why) == ("queue", "all 2 slots are taken")
    assert (prepared.kind, prepared.node, prepared.start, prepared.end) == ("compute", "prepare", 10.0, 10.5)

    clock.now, request.state = 12.0, "running"
    feed.admitted(request)
    encoder = encoded()
    request.encoder, request.prompt_tokens = encoder, 15
    (running,), (waited,) = feed.take()
    assert (running.state, running.prompt_tokens, running.why) == ("run", 15, "")
    assert (waited.kind, waited.end - waited.start) == ("queue", 1.5)
    assert (waited.kind, waited.node) == ("queue", "admission")
    encoder.first_at = encoder.first_sound_at = 12.25
    encoder.samples, encoder.audio_seconds = 100, 0.5
    (speaking,), _ = feed.take()
    assert (speaking.ttft_s, speaking.ttfa_s, speaking.audio_s) == (2.25, 2.25, 0.5)


def test_a_stream_that_goes_on_is_told_of_at_its_pace_and_what_is_first_at_once() -> None:
    clock = FakeClock(10.0)
    feed, request = RequestTelemetry(clock), live()
    request.state = "running"
    feed.opened(request, CALL)
    encoder = encoded(first_at=10.0)
    request.encoder, request.prompt_tokens = encoder, 15
    assert len(feed.take()[0]) == 1
    told = []
    for turn in range(1, 21):
        clock.now = 10.0 + turn * 0.1
        encoder.samples, encoder.audio_seconds = turn, turn * 0.1
        if turn == 2:
            encoder.first_sound_at = 10.15
        told += [turn for _ in feed.take()[0]]
    assert told[:2] == [2, 7], "the first sound at once, then half a second of silence"
    assert len(told) == 4


def test_the_end_is_told_whole_also_of_a_request_that_nobody_had_heard_of() -> None:
    clock = FakeClock(10.0)
    feed, request = RequestTelemetry(clock), live()
    feed.opened(request, CALL)
    request.result = {"usage": {"completion_tokens": 40, "prompt_tokens_details": {"cached_tokens": 8}}}
    clock.now = 11.0
    feed.ended(request, "finished", "")
    (news,), _ = feed.take()
    assert (news.id, news.state, news.started, news.ended, news.tokens, news.cached_tokens) == (
        "r-7",
        "finished",
        10.0,
        11.0,
        40,
        8,
    )
    assert feed.counts == {"finished": 1}
    assert feed.take() == ([], [])


def test_ends_that_nobody_takes_are_bounded_and_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "PENDING", 3)
    feed = RequestTelemetry(FakeClock(10.0))
    for handle in range(5):
        request = live(handle)
        feed.opened(request, CALL)
        feed.ended(request, "failed", "engine_error")
    news, _ = feed.take()
    assert [each.error for each in news] == ["engine_error"] * 3
    assert feed.dropped == 2
    assert feed.counts["failed"] == 5
