"""`whisper:tiny` over HTTP: all formats of transcriptions and translations, by OpenAI's client."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from mstar_core.config.resolved import KVCacheConfig
from mstar_whisper.checkpoint.config import RATE
from mstar_whisper.checkpoint.shipped import FOLDER
from tests.runtime.deployment import Deployment, Served

from .reference import melody, wav

NODES = ("spectrogram", "encoder", "decoder", "transcript")
WHISPER = Served(model="whisper", plugin="whisper", nodes=NODES, settings={"kv_cache": KVCacheConfig(pages=512)})
SECONDS = 2.6
"""Of the recording: three windows of the miniature."""

CALM: dict[str, Any] = {"fallback": "false", "max_output_tokens": "24"}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with Deployment(served=WHISPER) as running:
        yield openai.OpenAI(api_key="none", base_url=f"{running.url}/v1", max_retries=0)
        running.assert_clean()


def sound(seconds: float = SECONDS) -> Any:
    file = io.BytesIO(wav(melody(seconds)).data)
    file.name = "speech.wav"
    return file


def test_segments_and_words_have_times(client: openai.OpenAI) -> None:
    answer = client.audio.transcriptions.create(
        model="whisper",
        file=sound(),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        extra_body=CALM,
    )
    assert answer.language == "english" and float(answer.duration) == pytest.approx(SECONDS)
    assert answer.segments and [each.id for each in answer.segments] == list(range(len(answer.segments)))
    starts = [each.start for each in answer.segments]
    assert starts == sorted(starts) and starts[-1] >= 1.0, "later windows count from the start of the recording"
    for word in answer.words or ():
        assert 0 <= word.start <= word.end <= SECONDS + 1


def test_subtitles_and_texts_have_their_forms(client: openai.OpenAI) -> None:
    ask: Any = lambda form: client.audio.transcriptions.create(  # noqa: E731
        model="whisper", file=sound(), language="en", response_format=form, extra_body=CALM
    )
    assert ask("srt").startswith("1\n00:00:00,")
    assert ask("vtt").startswith("WEBVTT\n\n00:00:00.")
    assert ask("text").strip() == ask("json").text


def test_a_translation_has_the_same_forms(client: openai.OpenAI) -> None:
    with pytest.deprecated_call():  # by the client, not by the route
        answer = client.audio.translations.create(
            model="whisper", file=sound(0.8), response_format="verbose_json", extra_body=CALM
        )
    assert answer.segments is not None and float(answer.duration) == pytest.approx(0.8)


def test_a_stream_without_fallback_comes_id_by_id(client: openai.OpenAI) -> None:
    events = list(
        client.audio.transcriptions.create(
            model="whisper", file=sound(0.8), language="en", stream=True, extra_body=CALM
        )
    )
    assert [event.type for event in events[-1:]] == ["transcript.text.done"]
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert len(deltas) > 1 and "".join(deltas).strip() == events[-1].text  # type: ignore[union-attr]


def spoken() -> Any:
    """Return sentences with silence between them."""
    sentence, rate = soundfile.read(FOLDER / "sentence.wav", dtype="float32")
    assert rate == RATE
    file = io.BytesIO(wav(np.tile(np.concatenate([np.zeros(RATE, np.float32), sentence]), 3)).data)
    file.name = "speech.wav"
    return file


SIDE_BY_SIDE: dict[str, Any] = {**CALM, "batch_size": "4"}


def test_windows_side_by_side_are_one_transcript(client: openai.OpenAI) -> None:
    answer = client.audio.transcriptions.create(
        model="whisper", file=spoken(), language="en", response_format="verbose_json", extra_body=SIDE_BY_SIDE
    )
    segments = answer.segments or []
    starts = [each.start for each in segments]
    assert len(segments) >= 6 and starts == sorted(starts) and starts[0] > 0.5 and starts[-1] > 8
    assert [each.id for each in segments] == list(range(len(segments)))
    assert answer.text == "".join(each.text for each in segments).strip()
    events = client.audio.transcriptions.create(
        model="whisper", file=spoken(), language="en", stream=True, extra_body=SIDE_BY_SIDE
    )
    *deltas, done = list(events)
    assert len(deltas) > 6 and "".join(event.delta for event in deltas).strip() == done.text  # type: ignore[union-attr]


def test_a_client_that_leaves_ends_all_windows(client: openai.OpenAI) -> None:
    """The deployment must be clean at the end, see `client`."""
    with client.audio.transcriptions.create(
        model="whisper", file=spoken(), language="en", stream=True, extra_body={**SIDE_BY_SIDE, "ignore_eos": "true"}
    ) as events:
        assert next(iter(events)).type == "transcript.text.delta"


def test_refusals_name_their_field(client: openai.OpenAI) -> None:
    for fields, named in (
        ({"language": "klingon"}, "language"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
        ({"response_format": "srt", "stream": True}, "stream"),
        ({"extra_body": {"batch_size": "0"}}, "batch_size"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.audio.transcriptions.create(model="whisper", file=sound(0.8), **fields)  # type: ignore[call-overload]
        assert refused.value.param == named
