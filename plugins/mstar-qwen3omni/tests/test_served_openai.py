"""The miniature through the `openai` client: every content part in, text and speech out, bad input, disconnects."""

from __future__ import annotations

import base64
import io
import json
import re
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from mstar_core.config.resolved import KVCacheConfig
from tests.fakes import media
from tests.runtime.deployment import Deployment, Served, plan

RATE = 24000
NODES = ("audio_encoder", "vision_encoder", "Thinker", "Talker", "Code2Wav")
OMNI = Served(
    model="qwen3_omni",
    plugin="qwen3_omni",
    package="qwen3omni",
    nodes=NODES,
    settings={"max_seq_len": 2048, "kv_cache": KVCacheConfig(pages=1024)},
)
SEED = 5
PAGE = 16
"""Tokens of a cache page, the default."""

FRAMES = 30
LIMITS = {"talker_max_tokens": FRAMES}


def url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


TEXT = {"type": "text", "text": "What do you see and hear?"}
IMAGE = {"type": "image_url", "image_url": {"url": url("image/png", media.image(64, 48))}}
SOUND = {
    "type": "input_audio",
    "input_audio": {"data": base64.b64encode(media.wav(0.8, 44_100, 2)).decode(), "format": "wav"},
}
VIDEO = {"type": "video_url", "video_url": {"url": url("video/mp4", media.video(64, 48))}}
QUESTIONS: dict[str, list[dict[str, Any]]] = {
    "text": [TEXT],
    "image": [IMAGE, TEXT],
    "sound": [SOUND, TEXT],
    "video": [VIDEO, TEXT],
    "all": [TEXT, IMAGE, SOUND, VIDEO, TEXT],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Deployment]:
    with Deployment(served=OMNI, where=plan({0: NODES[:3], 1: NODES[3:]})) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def write(client: openai.OpenAI, content: list[dict[str, Any]], **more: Any) -> Any:
    """Ask for text alone."""
    given: dict[str, Any] = {"max_tokens": 12, "seed": SEED, **more}
    return client.chat.completions.create(model="qwen3_omni", messages=[{"role": "user", "content": content}], **given)


def speak(client: openai.OpenAI, content: list[dict[str, Any]], **more: Any) -> Any:
    """Ask for text and speech."""
    given: dict[str, Any] = {"audio": {"voice": "chelsie", "format": "wav"}, "extra_body": LIMITS, **more}
    return write(client, content, modalities=["text", "audio"], **given)


def samples(wav: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(wav)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def heard(answer: Any) -> tuple[str, np.ndarray]:
    """Return transcript and sound of a whole spoken answer."""
    audio = answer.choices[0].message.audio
    return audio.transcript, samples(base64.b64decode(audio.data))


def streamed(client: openai.OpenAI, content: list[dict[str, Any]], **more: Any) -> tuple[str, np.ndarray]:
    """Return text and sound of a streamed spoken answer. The transcript repeats the text."""
    stream = speak(client, content, stream=True, audio={"voice": "chelsie", "format": "pcm16"}, **more)
    text, transcript, pcm = "", "", b""
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            audio = choice.delta.audio
            if audio is not None:
                pcm += base64.b64decode(audio.data or "")
                transcript += audio.transcript or ""
    assert transcript == text
    return text, np.frombuffer(pcm, "<i2")


@pytest.mark.parametrize("name", QUESTIONS)
def test_text_of_every_input(name: str, client: openai.OpenAI) -> None:
    answer, again = write(client, QUESTIONS[name]), write(client, QUESTIONS[name])
    assert answer.choices[0].message.content == again.choices[0].message.content
    assert answer.choices[0].message.content
    details = answer.usage.prompt_tokens_details
    kinds = {"image": details.image_tokens, "sound": details.audio_tokens, "video": details.video_tokens}
    for kind, count in kinds.items():
        assert bool(count) == (name in (kind, "all")), (kind, details)
    # The second prompt is cached but for the last page of each part, media included, and the answer is the same.
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached >= answer.usage.prompt_tokens - PAGE * len(QUESTIONS[name]) and cached > sum(map(int, kinds.values()))
    assert sum(kinds.values()) + details.text_tokens == answer.usage.prompt_tokens


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_streamed_spoken_answer_equals_the_whole_one(name: str, client: openai.OpenAI, server: Deployment) -> None:
    answer = speak(client, QUESTIONS[name])
    text, sound = heard(answer)
    other_text, other_sound = streamed(client, QUESTIONS[name])
    assert text == other_text and text
    assert len(sound) and np.array_equal(sound, other_sound)
    assert len(sound) <= FRAMES * 1920
    assert answer.usage.completion_tokens_details.audio_tokens == -(-len(sound) // 1920)
    server.assert_clean()


def test_many_mixed_requests_at_once_equal_each_alone(client: openai.OpenAI, server: Deployment) -> None:
    alone = {name: heard(speak(client, content)) for name, content in QUESTIONS.items()}
    with ThreadPoolExecutor(16) as pool:
        spoken = [(name, pool.submit(streamed, client, QUESTIONS[name])) for name in (*QUESTIONS, *QUESTIONS)]
        written = [pool.submit(write, client, content) for content in QUESTIONS.values()]
    assert all(job.result().choices[0].message.content for job in written)
    for name, job in spoken:
        text, sound = job.result()
        assert text == alone[name][0], name
        assert np.array_equal(sound, alone[name][1]), name
    server.assert_clean()


def test_seeds_and_voices_change_the_sound(client: openai.OpenAI) -> None:
    sounds = [
        heard(speak(client, [TEXT], seed=seed, audio={"voice": voice, "format": "wav"}))[1].tobytes()
        for seed, voice in ((SEED, "ethan"), (SEED, "aiden"), (SEED + 1, "ethan"))
    ]
    assert len(set(sounds)) == 3


def test_a_client_that_leaves_in_the_middle_of_speech_frees_everything(
    client: openai.OpenAI, server: Deployment
) -> None:
    stream = speak(
        client,
        QUESTIONS["all"],
        stream=True,
        audio={"voice": "ethan", "format": "pcm16"},
        max_tokens=500,
        extra_body={"talker_max_tokens": 1000, "ignore_eos": True},
    )
    for chunk in stream:
        if any(choice.delta.audio for choice in chunk.choices):
            break
    stream.close()
    server.assert_clean()
    assert write(client, [TEXT]).choices[0].message.content


def test_a_call_that_must_come_obeys_its_schema(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert {"tools", "structured_outputs"} <= set(card.model_extra["capabilities"])  # type: ignore[index]
    parameters = {
        "type": "object",
        "properties": {
            "shape": {"enum": ["round", "square"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["shape", "count"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "note", "strict": True, "parameters": parameters}}
    for temperature in (0.0, 1.0):
        answer = write(
            client,
            [IMAGE, TEXT],
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
            temperature=temperature,
            frequency_penalty=2.0,  # the miniature would fill its limit with the blanks that JSON allows
        )
        (call,) = answer.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "note" and arguments["shape"] in ("round", "square")
        assert 0 <= arguments["count"] <= 99 and arguments.keys() == {"shape", "count"}


def test_a_form_holds_text_that_is_also_spoken(client: openai.OpenAI, server: Deployment) -> None:
    forms: list[tuple[dict[str, Any], re.Pattern[str]]] = [
        ({"regex": "[a-c]{4,9}!"}, re.compile("[a-c]{4,9}!")),
        ({"choice": ["a red house", "the sea"]}, re.compile("a red house|the sea")),
        (
            {"response_format": {"type": "json_schema", "json_schema": NUMBERED}},
            re.compile(r'\{\s*"n"\s*:\s*\d{1,2}\s*\}'),
        ),
    ]
    for form, pattern in forms:
        given = {"max_tokens": 100, "frequency_penalty": 2.0}
        answer = speak(client, [TEXT], extra_body={**form, **LIMITS}, **given)
        text, sound = heard(answer)
        assert answer.choices[0].finish_reason == "stop" and pattern.fullmatch(text), text
        assert len(sound)
        other_text, other_sound = streamed(client, [TEXT], extra_body={**form, **LIMITS}, **given)
        assert other_text == text and np.array_equal(other_sound, sound)
    server.assert_clean()


def test_speech_is_an_answer_and_a_transcription_is_text(client: openai.OpenAI, server: Deployment) -> None:
    spoken = client.audio.speech.create(
        model="qwen3_omni",
        voice="ethan",
        input="Say something.",
        response_format="wav",
        extra_body={"talker_max_tokens": 20, "seed": SEED},
    )
    assert len(samples(spoken.read()))
    text = client.audio.transcriptions.create(
        model="qwen3_omni", file=("clip.wav", media.wav(1.0, 48_000)), extra_body={"max_tokens": 8}
    )
    assert isinstance(text.text, str)
    server.assert_clean()


NUMBERED = {
    "name": "n",
    "strict": True,
    "schema": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
BROKEN = {
    "image": {"type": "image_url", "image_url": {"url": url("image/png", media.image(64, 48)[:60])}},
    "audio": {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"RIFF....").decode(), "format": "wav"}},
    "no samples": {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(media.wav(0)).decode(), "format": "wav"},
    },
    "video": {"type": "video_url", "video_url": {"url": url("video/mp4", media.video()[:400])}},
    "image as sound": {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(media.image()).decode(), "format": "wav"},
    },
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_by_name(name: str, client: openai.OpenAI, server: Deployment) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        write(client, [BROKEN[name], TEXT])
    assert 400 <= error.value.status_code < 500
    assert error.value.param and error.value.code
    server.assert_clean()


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"audio": {"voice": "julia", "format": "wav"}, "modalities": ["text", "audio"]}, "julia"),
        ({"audio": {"voice": "ethan", "format": "mp9"}, "modalities": ["text", "audio"]}, "mp9"),
        ({"modalities": ["text", "image"]}, "image"),
        ({"extra_body": {"talker_top_p": 3}}, "talker_top_p"),
    ],
)
def test_wrong_parameters_are_refused_by_name(more: dict[str, Any], word: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match=word) as error:
        write(client, [TEXT], **more)
    assert error.value.status_code == 400


def test_more_media_than_the_context_holds_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    picture = {"type": "image_url", "image_url": {"url": url("image/png", media.image(1600, 1600))}}
    with pytest.raises(openai.APIStatusError, match=r"\d{4}.*2048") as error:
        write(client, [picture, TEXT])
    assert error.value.status_code == 400


def test_generate_and_the_models_list_name_the_model(server: Deployment) -> None:
    listed = httpx.get(f"{server.url}/v1/models", timeout=30).json()
    assert "qwen3_omni" in {entry["id"] for entry in listed["data"]}


def test_the_next_turn_of_a_session_reads_only_what_is_new(client: openai.OpenAI) -> None:
    """Text, then a sound; the answers before are found by their ids, the sound by its content."""
    messages: list[Any] = []
    known, parts = 0, 1
    for turn, content in enumerate(([TEXT], [SOUND, TEXT], [TEXT])):
        messages.append({"role": "user", "content": content})
        answer = client.chat.completions.create(
            model="qwen3_omni",
            messages=messages,
            max_tokens=30,
            seed=SEED + turn,
            extra_body={"session_id": "talk"},
        )
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        # Up to a page is read again before each medium and behind it, and at the end.
        assert (usage.prompt_tokens_details.cached_tokens or 0) > known - PAGE * parts
        parts += 2 if SOUND in content else 0
        known = usage.prompt_tokens + usage.completion_tokens - 1
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    assert known > 120


def test_an_image_that_a_session_keeps_gives_the_same_answer(client: openai.OpenAI, server: Deployment) -> None:
    text, sound = heard(speak(client, QUESTIONS["image"]))
    for count in range(3):
        answer = speak(client, QUESTIONS["image"], extra_body={**LIMITS, "session_id": "look"})
        again, other = heard(answer)
        assert again == text and np.array_equal(other, sound)
        metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
        assert 'mstar_session_images_total{how="decoded"} 1.0' in metrics
        assert not count or f'mstar_session_images_total{{how="kept"}} {count}.0' in metrics
    server.assert_clean()
