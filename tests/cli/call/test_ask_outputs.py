"""Outputs that a call requests."""

from __future__ import annotations

import pytest

from mstar_core.client import Line
from mstarctl.call.ask import Card, requested_outputs
from mstarctl.call.report import Tally, is_cut_short


@pytest.mark.parametrize(
    ("outputs", "kind", "expected"),
    [
        (("text", "audio"), "audio", ("text", "audio")),
        (("text", "audio"), "text", ("text",)),
        (("audio",), "audio", ("audio",)),
        (("text", "image"), "image", ("image",)),
    ],
)
def test_speech_is_requested_with_its_text(outputs: tuple[str, ...], kind: str, expected: tuple[str, ...]) -> None:
    card = Card(name="m", inputs=("text",), outputs=outputs, parameters=frozenset())
    assert requested_outputs(card, kind) == expected


def test_only_chunks_of_the_written_kind_are_counted() -> None:
    tally = Tally(started=0.0, kind="audio")
    for modality in ("start", "text", "audio", "text", "audio"):
        tally.add(Line(modality=modality, data=b"ab", metadata={}))
        assert (tally.first_s is None) == (modality in ("start", "text") and not tally.chunks)
    assert tally.chunks == 2


@pytest.mark.parametrize(
    ("text", "seconds", "short"),
    [
        ("one two three four five six seven eight nine", 3.0, False),
        ("one two three four five six seven eight nine", 0.7, True),
        ("one two three four five six seven eight nine", 0.0, True),
        ("Hello there", 0.1, False),
        ("", 0.0, False),
    ],
)
def test_speech_that_cannot_contain_its_text_is_noticed(text: str, seconds: float, short: bool) -> None:
    assert is_cut_short(text, seconds) == short
