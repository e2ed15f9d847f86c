"""Steps that several requests share: which passes there are, and how many requests each of them takes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from mstar_whisper.checkpoint.config import HEAD
from mstar_whisper.nodes.decoder import SpeechDecoder
from mstar_whisper.nodes.encoder import WINDOWS, Encoder

from .reference import SIZES, Served, ids_of, melody, write_checkpoint

COUNT = 6
IDS = 8
"""Ids of each text, which never ends by itself."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(write_checkpoint(tmp_path_factory.mktemp("whisper") / "random", 4, end_bias=-30.0, time_bias=-30.0))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Kinds of passes with their requests or tokens, and how often they ran."""
    found: Counter[tuple[str, int]] = Counter()
    encode, forward = Encoder.forward, SpeechDecoder.forward

    def encoded(self: Encoder, **inputs: Any) -> Any:
        found["windows", len(inputs["place"])] += 1
        return encode(self, **inputs)

    def decoded(self: SpeechDecoder, **inputs: Any) -> Any:
        kind = next(name for name in ("states", "written", "marks", "tokens", "token") if inputs.get(name) is not None)
        found[kind, len(inputs[kind])] += 1
        return forward(self, **inputs)

    monkeypatch.setattr(Encoder, "forward", encoded)
    monkeypatch.setattr(SpeechDecoder, "forward", decoded)
    return found


def test_requests_that_arrive_together_share_each_pass(passes: Counter[tuple[str, int]], served: Served) -> None:
    answers = served.ask(*(melody(0.8, number) for number in range(COUNT)), language="en", max_output_tokens=IDS)
    assert [len(ids_of(answer)) for answer in answers] == [IDS] * COUNT
    assert passes["windows", COUNT] == 1 and passes["states", COUNT * SIZES.states] == 1
    assert passes["marks", COUNT] == HEAD + IDS
    assert not [each for each in passes if each[0] in ("tokens", "token")], "the end of a prompt is drawn, not read"


def test_a_prompt_with_earlier_text_is_read_in_one_pass(passes: Counter[tuple[str, int]], served: Served) -> None:
    (answer,) = served.ask(melody(0.8), language="en", prompt="names", max_output_tokens=IDS)
    assert len(ids_of(answer)) == IDS
    assert sum(count for (kind, _), count in passes.items() if kind == "tokens") == 1
    assert passes["marks", 1] == IDS - 1


def test_drawn_prompts_give_the_ids_of_prompts_that_are_read(served: Served) -> None:
    for number in range(3):
        sound = melody(0.8, number)
        drawn = served.ids(sound, language="de", max_output_tokens=IDS)
        assert served.ids(sound, language="de", max_output_tokens=IDS, incremental=True) == drawn


def test_every_batch_of_windows_has_a_bucket_that_wastes_little() -> None:
    for count in range(1, max(WINDOWS) + 1):
        holds = min(size for size in WINDOWS if size >= count)
        assert holds <= count * 3 / 2, count
