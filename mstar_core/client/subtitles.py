"""Timed segments as subtitles or JSON: SubRip, WebVTT. Used by the transcription routes and by `mstarctl call`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

FORMATS: Final = ("srt", "vtt")
"""Formats of subtitles."""


def subtitles(segments: Iterable[tuple[float, float, str]], form: str, duration: float = 0.0) -> str:
    """Return segments as SubRip (`srt`) or WebVTT (`vtt`).

    segments: start and end in seconds, and the text. duration: of the recording, 0 if unknown: a segment may end in the
    silence that fills a window up.
    """
    mark = "," if form == "srt" else "."
    blocks = []
    for number, (start, end, text) in enumerate(segments, start=1):
        times = f"{_clock(start, mark)} --> {_clock(max(start, min(end, duration or end)), mark)}"
        # A blank line ends a subtitle, and an arrow is the line of its times.
        line = " ".join(text.split()).replace("-->", "->")
        blocks.append(f"{number}\n{times}\n{line}\n" if form == "srt" else f"{times}\n{line}\n")
    return "\n".join(["WEBVTT\n", *blocks] if form == "vtt" else blocks)


class SegmentFile:
    """The segments of an answer, window by window. form: `srt`, `vtt` or `json`."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._language, self._duration = "", 0.0
        self._segments, self._words = list[dict[str, Any]](), list[dict[str, Any]]()

    def add(self, data: bytes, facts: Mapping[str, Any]) -> None:
        """Add one output of modality `segments`. facts: its metadata, with the `duration`."""
        part = json.loads(data)
        self._language = self._language or str(part["language"])
        self._duration = float(facts.get("duration") or self._duration)
        self._segments += part["segments"]
        self._words += part.get("words", [])

    def text(self) -> str:
        """Return the file's content."""
        if self._form in FORMATS:
            timed = ((each["start"], each["end"], each["text"]) for each in self._segments)
            return subtitles(timed, self._form, self._duration)
        text = "".join(each["text"] for each in self._segments).strip()
        whole = {"language": self._language, "duration": self._duration, "text": text}
        return json.dumps({**whole, "segments": self._segments, "words": self._words}, ensure_ascii=False) + "\n"


def _clock(seconds: float, mark: str) -> str:
    """Return seconds as `HH:MM:SS` and milliseconds behind a mark."""
    milliseconds = round(seconds * 1000)
    hours, rest = divmod(milliseconds, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{mark}{rest % 1000:03}"
