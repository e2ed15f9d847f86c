"""Tokens of text and audio in the usage object, by the counts of the conductor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mstar_core.api.output.usage import SampledPorts, usage_of
from mstar_core.plugin import Audio, ModelSpec, Text
from tests.fakes.omni_model import RATE, SPEC, TEXT_ONLY

TALKS = replace(SPEC, outputs=(Text(), Audio(rate=RATE, token_loop="talker_loop")))


class Sent:
    """Encoder that has sent some ids of text."""

    def __init__(self, text_tokens: int) -> None:
        self.text_tokens = text_tokens


def completion(spec: ModelSpec, shown: int, **counts: int) -> list[int]:
    encoder: Any = Sent(shown)
    usage = usage_of(
        spec, SampledPorts.by(spec), encoder, prompt_tokens=5, cached_tokens=0, counts=counts, media={"audio": 2}
    )
    details = usage["completion_tokens_details"]
    assert usage["total_tokens"] == 5 + usage["completion_tokens"]
    return [usage["completion_tokens"], details["text_tokens"], details["audio_tokens"]]


@pytest.mark.parametrize(
    ("spec", "shown", "counts", "expected"),
    [
        (TALKS, 4, {"token": 4, "talker_loop": 30}, [34, 4, 30]),
        (TALKS, 4, {"token": 4}, [4, 4, 0]),
        (TALKS, 0, {"token": 4, "talker_loop": 30}, [34, 0, 30]),  # speech alone was requested
        (SPEC, 4, {"token": 9}, [9, 4, 5]),
        (TEXT_ONLY, 4, {"token": 9}, [9, 4, 0]),
    ],
)
def test_generated_tokens_are_counted_by_modality(
    spec: ModelSpec, shown: int, counts: dict[str, int], expected: list[int]
) -> None:
    assert completion(spec, shown, **counts) == expected
