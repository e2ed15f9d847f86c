"""Transcripts with times: segments of several outputs joined, as JSON and as subtitles."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from mstar_core.api.output.transcript import Transcript
from mstar_core.api.schema import CompletionTokens, PromptTokens, Usage

USAGE = Usage(
    prompt_tokens=4,
    completion_tokens=3,
    total_tokens=7,
    prompt_tokens_details=PromptTokens(text_tokens=4),
    completion_tokens_details=CompletionTokens(text_tokens=3),
)


def part(*segments: tuple[float, float, str], words: tuple[tuple[str, float, float], ...] = ()) -> bytes:
    """One output of modality `segments`."""
    found: dict[str, Any] = {
        "language": "english",
        "segments": [{"start": start, "end": end, "text": text, "tokens": [1]} for start, end, text in segments],
        "words": [{"word": word, "start": start, "end": end} for word, start, end in words],
    }
    return json.dumps(found).encode()


def transcript() -> Transcript:
    """Two outputs; the last segment ends behind the recording."""
    found = Transcript()
    found.add(part((0.0, 1.5, " Hello --> there."), words=(("Hello", 0.0, 0.7),)), {"duration": 3661.25})
    found.add(part((3600.0, 3690.0, " And\n\nagain.")), {"duration": 3661.25})
    return found


def test_segments_of_all_windows_are_numbered_in_order() -> None:
    answer = transcript().verbose("Hello there. And again.", "transcribe", (), USAGE)
    assert answer.segments and [segment.id for segment in answer.segments] == [0, 1]
    assert (answer.language, answer.duration, answer.task) == ("english", 3661.25, "transcribe")
    assert answer.words is msgspec.UNSET


def test_words_come_where_they_are_asked_for() -> None:
    answer = transcript().verbose("", "transcribe", ["word"], USAGE)
    assert answer.segments is msgspec.UNSET and answer.words
    assert [word.word for word in answer.words] == ["Hello"]


def test_subtitles_hold_their_form_whatever_the_text() -> None:
    assert transcript().subtitles("srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello -> there.\n\n2\n01:00:00,000 --> 01:01:01,250\nAnd again.\n"
    )
    assert transcript().subtitles("vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello -> there.\n")
    assert "NaN" not in Transcript().subtitles("srt")
