"""The miniature interrupted at every second frame of its answer, over /v1/realtime: text, sound and pages."""

from __future__ import annotations

import base64
import wave
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.api.realtime.client import RealtimeClient, conversing
from tests.runtime.deployment import Deployment, until

from .test_served_openai import OMNI

WORD = Path(__file__).parents[1] / "src/mstar_qwen3omni/checkpoint/mini/seven.wav"
RATE = 24_000
FRAME_MS, EVERY = 80, 2
PIECE_BYTES = 2 * RATE * FRAME_MS // 1000 * EVERY
SESSION = {
    "type": "realtime",
    "temperature": 0,
    "talker_temperature": 0,
    "code_predictor_temperature": 0,
    "seed": 1,
    "ignore_eos": True,
    "max_output_tokens": 24,
    "codec_first_frames": EVERY,
    "codec_chunk_frames": EVERY,
}
"""A long answer, the same each time, whose sound comes in pieces of two frames. Its speech ends after one word."""


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment(served=OMNI, name="interrupts", weights_source="mini") as running:
        yield running


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer as its client got it. known: for each sample count, the text that had come before."""

    item_id: str
    text: str
    samples: int
    known: list[tuple[int, str]]

    def text_at(self, samples: int) -> str:
        """Return the text that had come when so many samples were there."""
        return max((text for count, text in self.known if count <= samples), key=len, default="")


def heard(client: RealtimeClient) -> Heard:
    """Return the last answer, from all events of its client."""
    begin = max(n for n, event in enumerate(client.events) if event["type"] == "response.created")
    text, samples, item_id, known = "", 0, "", []
    for event in client.events[begin:]:
        match event["type"]:
            case "response.output_audio_transcript.delta":
                text += event["delta"]
                known.append((samples, text))
            case "response.output_audio.delta":
                samples += len(base64.b64decode(event["delta"])) // 2
                item_id = event["item_id"]
            case _:
                pass
    return Heard(item_id, text, samples, known)


@asynccontextmanager
async def asked(deployment: Deployment, turns: Any = None) -> AsyncIterator[RealtimeClient]:
    """Open a conversation whose first answer has been requested."""
    async with conversing(deployment) as client:
        await client.send("session.update", session={**SESSION, "audio": {"input": {"turn_detection": turns}}})
        await client.until("session.updated")
        await client.hear(word(0.1))
        if turns is None:
            await client.send("input_audio_buffer.commit")
            await client.send("response.create")
        yield client


def word(silence_s: float) -> np.ndarray:
    """Return the spoken question between silences, at 24 kHz."""
    with wave.open(str(WORD)) as file:
        rate, data = file.getframerate(), file.readframes(file.getnframes())
    samples = np.frombuffer(data, "<i2").astype(np.float64)
    places = np.arange(int(len(samples) * RATE / rate)) * rate / RATE
    silence = np.zeros(int(silence_s * RATE))
    whole = np.concatenate([silence, np.interp(places, np.arange(len(samples)), samples), silence])
    return whole.astype(np.int16)


async def pieces(client: RealtimeClient, count: int) -> None:
    """Read until so many pieces of sound have come."""
    while heard_bytes(client) < count * PIECE_BYTES:
        await client.until("response.output_audio.delta")


def heard_bytes(client: RealtimeClient) -> int:
    """Return the bytes of sound of the last response."""
    created = client.of("response.created")
    return 2 * heard(client).samples if created else 0


async def kept(client: RealtimeClient, item_id: str) -> str:
    """Return the transcript that the conversation keeps."""
    await client.send("conversation.item.retrieve", item_id=item_id)
    item = (await client.until("conversation.item.retrieved"))["item"]
    return str(item["content"][0]["transcript"])


async def test_an_interrupt_at_every_second_frame_ends_the_text_where_the_sound_ended(deployment: Deployment) -> None:
    async with asked(deployment) as client:
        assert (await client.until("response.done"))["response"]["status"] == "incomplete"
        whole = heard(client)
    frames = whole.samples * 1000 // RATE // FRAME_MS
    assert frames > 4 * EVERY, whole
    before = -1
    for number in range(1, frames // EVERY + 1):
        played_ms = number * EVERY * FRAME_MS
        async with asked(deployment) as client:
            await pieces(client, number)
            place = {"item_id": heard(client).item_id, "content_index": 0, "audio_end_ms": played_ms}
            await client.send("conversation.item.truncate", **place)
            await client.until("conversation.item.truncated")
            text, answer = await kept(client, place["item_id"]), heard(client)
            assert whole.text.startswith(text), (number, text)
            assert len(text) <= len(answer.text) * played_ms * RATE // 1000 / answer.samples + 1
            if client.of("response.done")[-1]["response"]["status"] == "cancelled":
                assert len(text) <= len(answer.text_at(played_ms * RATE // 1000)), (number, text)
            await client.send("conversation.item.truncate", **{**place, "audio_end_ms": played_ms + 1})
            assert (await client.until("error"))["error"]["param"] == "audio_end_ms", "the sound ends there too"
        before = max(before, len(text))
    assert before > len(whole.text) // 2, "the last interrupts keep most of the text"
    deployment.assert_clean()


async def test_speech_interrupts_at_every_second_frame_and_the_next_turn_is_answered(deployment: Deployment) -> None:
    turns = {"type": "server_vad", "silence_duration_ms": 300}
    async with asked(deployment, turns) as client:
        await client.hear(np.zeros(RATE // 2, np.int16))
        await client.until("response.created")
        for number in (1, 2):
            await pieces(client, number)
            await client.hear(word(0.5))
            await client.until("input_audio_buffer.speech_started")
            done = (await client.until("response.done"))["response"]
            answer = heard(client)
            if done["status"] == "cancelled":
                assert done["status_details"]["reason"] == "turn_detected"
            place = {"item_id": answer.item_id, "content_index": 0, "audio_end_ms": number * EVERY * FRAME_MS}
            await client.send("conversation.item.truncate", **place)
            await client.until("conversation.item.truncated")
            assert answer.text.startswith(await kept(client, answer.item_id))
            if client.of("response.created")[-1]["response"]["id"] == done["id"]:
                await client.until("response.created")
    deployment.assert_clean()
    assert until(lambda: deployment.value("api.sessions") == 0, "the end of the session")
