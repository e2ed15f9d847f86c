"""Values that a schema allows but a model cannot use: each is the request's fault, with a clear error."""

from __future__ import annotations

import io
import logging
from typing import Any

import numpy as np
import pytest
import soundfile

from mstar_core.api.parse.params import LEAST_TEMPERATURE, _check_temperatures
from mstar_core.errors import BadMedia, RequestError
from mstar_core.messages.life import Telemetry
from mstar_core.messages.telemetry import RequestNews
from mstar_core.plugin.media.limits import MediaLimits
from mstar_core.plugin.media.sounds import read_sound
from mstar_core.plugin.observation import ARRAY, unpacked
from tests.api.conftest import Api, Started
from tests.fakes.conductor import speak
from tests.fakes.speech_model import SPEC


def test_a_temperature_that_makes_logits_infinite_is_refused() -> None:
    made: Any = SPEC.params()
    if not hasattr(made, "temperature"):
        pytest.fail("the fake model has no temperature")
    for value in (0.0, LEAST_TEMPERATURE, 1.0):
        object.__setattr__(made, "temperature", value)
        _check_temperatures(made)
    for value in (5e-324, 1e-9):
        object.__setattr__(made, "temperature", value)
        with pytest.raises(RequestError, match="temperature"):
            _check_temperatures(made)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_sound_with_values_that_are_not_finite_is_undecodable(bad: float) -> None:
    samples = np.zeros(1000, np.float32)
    samples[500] = bad
    file = io.BytesIO()
    soundfile.write(file, samples, 16000, format="WAV", subtype="FLOAT")
    with pytest.raises(BadMedia):
        read_sound(file.getvalue(), 16000, MediaLimits())


@pytest.mark.parametrize("shape", [[0, 1 << 62], [1 << 62, 0], [0, 1 << 40, 1 << 40]])
def test_an_array_of_an_impossible_shape_is_an_invalid_value(shape: list[int]) -> None:
    import msgspec

    message = msgspec.msgpack.encode({"state": {ARRAY: True, b"data": b"", b"dtype": "<f4", b"shape": shape}})
    with pytest.raises(RequestError) as refused:
        unpacked(message)
    assert refused.value.code == "invalid_value"


async def test_null_is_an_absent_field(started: Started) -> None:
    async with started(speak(1)) as api:
        body = {"text": "x", "output_modalities": "audio", "streaming": False, "stream": None, "stream_events": None}
        assert (await api.client.post("/generate", json=body)).status_code == 200


async def test_the_log_has_the_sentence_of_a_failure(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mstar.api")
    async with started(speak(1)) as api:
        answer = await api.client.post("/generate", data={"text": "x", "model_kwargs": '{"tempurature": 1}'})
        assert answer.status_code == 400
        await api.until(lambda: any(getattr(each, "facts", {}).get("status") == 400 for each in caplog.records))
        (line,) = (each for each in caplog.records if getattr(each, "facts", {}).get("status") == 400)
        assert line.facts["error"] == answer.json()["error"]["message"]  # type: ignore[attr-defined]


async def test_the_record_of_a_request_has_the_sentence_of_its_failure(started: Started) -> None:
    async with started(speak(1)) as api:
        answer = await api.client.post("/generate", data={"text": "x" * 1001, "output_modalities": "audio"})
        assert answer.status_code == 400, answer.text
        await api.fake.until(lambda: bool(told(api)))
        (news,) = told(api)
        assert (news.error, news.message) == ("context_length_exceeded", answer.json()["error"]["message"])


def told(api: Api) -> list[RequestNews]:
    """Return the reports of failed requests that the supervisor got."""
    batches = [message for _, message in api.fake.received if isinstance(message, Telemetry)]
    return [news for batch in batches for news in batch.requests if news.message]
