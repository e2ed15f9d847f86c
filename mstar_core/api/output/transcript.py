"""Transcript with times: the segments of a request joined, as JSON or subtitles. Used by the transcription routes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mstar_core.api.schema import TimedSegment, TimedWord, Usage, VerboseTranscription
from mstar_core.client.subtitles import subtitles


@dataclass(slots=True)
class Transcript:
    """Segments and words so far. language: English name, in lower case. duration: of the recording, in seconds."""

    segments: list[TimedSegment] = field(default_factory=list)
    words: list[TimedWord] = field(default_factory=list)
    language: str = ""
    duration: float = 0.0

    def add(self, data: bytes, facts: Mapping[str, Any]) -> None:
        """Add one output of modality `segments`. facts: its metadata, with the `duration`."""
        part = msgspec.json.decode(data)
        self.language = self.language or str(part["language"])
        self.duration = float(facts.get("duration") or self.duration)
        for segment in part["segments"]:
            numbered = {**segment, "id": len(self.segments)}
            self.segments.append(msgspec.convert(numbered, TimedSegment))
        self.words += msgspec.convert(part.get("words", []), list[TimedWord])

    def verbose(self, text: str, task: str, granularities: Collection[str], usage: Usage) -> VerboseTranscription:
        """Return the form `verbose_json`. granularities: `word` and `segment`; none is `segment`."""
        answer = VerboseTranscription(task=task, language=self.language, duration=self.duration, text=text, usage=usage)
        if "segment" in granularities or not granularities:
            answer.segments = self.segments
        if "word" in granularities:
            answer.words = self.words
        return answer

    def subtitles(self, form: str) -> str:
        """Return the segments as subtitles: SubRip (`srt`) or WebVTT (`vtt`)."""
        return subtitles(((each.start, each.end, each.text) for each in self.segments), form, self.duration)
