"""/v1/realtime with a microphone: formats, commits, turns by Silero's model, interrupts, truncation, transcripts."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from mstar_core.api.realtime.sound.formats import SoundFormat
from mstar_core.api.realtime.sound.resampling import resampled_whole
from mstar_core.messages.requests import NewRequest
from mstar_core.messages.telemetry import SessionNews
from tests.api.conftest import Api, Started
from tests.api.realtime.client import RealtimeClient, conversing
from tests.fakes.conductor import FakeDeployment, echo, say
from tests.fakes.omni_model import SPEC

FILE = Path(__file__).parents[3] / "plugins/mstar-qwen3omni/src/mstar_qwen3omni/checkpoint/mini/seven.wav"
RATE = 24_000


def spoken(before_s: float = 0.5, after_s: float = 1.0) -> np.ndarray:
    """Return the spoken word `seven` between silences, at 24 kHz."""
    samples, rate = soundfile.read(FILE, dtype="int16")
    word = resampled_whole(samples, rate, RATE)
    silences = [np.zeros(int(length * RATE), np.int16) for length in (before_s, after_s)]
    return np.concatenate([silences[0], word, silences[1]])


def news(api: Api) -> SessionNews:
    """Return what the supervisor gets about the only session."""
    (session,) = api.process.link.sessions()
    return session


async def configure(client: RealtimeClient, **sound: Any) -> None:
    """Set fields of the user's sound."""
    await client.send("session.update", session={"type": "realtime", "audio": {"input": sound}})
    await client.until("session.updated")


async def test_sound_is_buffered_committed_and_answered_on_demand(started: Started) -> None:
    async with started(echo, model=SPEC) as api, conversing(api) as client:
        await configure(client, turn_detection=None)
        await client.hear(np.full(RATE, 500, np.int16))
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        await client.hear(np.full(2 * RATE, 500, np.int16))
        await client.send("input_audio_buffer.commit")
        committed = await client.until("input_audio_buffer.committed")
        added = await client.until("conversation.item.added")
        assert added["item"]["id"] == committed["item_id"]
        await client.respond(output_modalities=["text"])
        assert api.fake.prompt(api.fake.requests[0]) == "<user>[audio 32000]<assistant>"
        await client.send("conversation.item.retrieve", item_id=committed["item_id"])
        item = (await client.until("conversation.item.retrieved"))["item"]
        heard = np.frombuffer(base64.b64decode(item["content"][0]["audio"]), "<i2")
        assert len(heard) == 2 * RATE and abs(int(heard[RATE]) - 500) < 5
        assert "input_audio_buffer.speech_started" not in client.kinds


async def test_a_conversation_has_more_sounds_than_a_request_has_uploads(started: Started) -> None:
    async with started(echo, model=SPEC, max_files=2) as api, conversing(api) as client:
        await configure(client, turn_detection=None)
        for _ in range(3):
            await client.hear(np.full(RATE // 5, 500, np.int16))
            await client.send("input_audio_buffer.commit")
            await client.until("conversation.item.done")
        assert (await client.respond(output_modalities=["text"]))["status"] == "completed"
        assert api.fake.prompt(api.fake.requests[0]).count("[audio") == 3


@pytest.mark.parametrize("law", ["mu", "a"])
async def test_telephone_sound_comes_and_goes(law: Any, started: Started) -> None:
    form, kind = SoundFormat(rate=8000, law=law), {"type": f"audio/pcm{'u' if law == 'mu' else 'a'}"}
    async with started(echo, model=SPEC) as api, conversing(api) as client:
        sound = {"input": {"format": kind, "turn_detection": None}, "output": {"format": kind}}
        await client.send("session.update", session={"audio": sound})
        await client.until("session.updated")
        data = form.encode(np.zeros(8000, np.int16))
        item = {"type": "message", "role": "user"}
        content = [{"type": "input_audio", "audio": base64.b64encode(data).decode()}]
        await client.send("conversation.item.create", item={**item, "content": content})
        await client.until("conversation.item.done")
        done = await client.respond()
        assert api.fake.prompt(api.fake.requests[0]) == "<user>[audio 16000]<assistant>"
        deltas = client.of("response.output_audio.delta")
        assert sum(len(base64.b64decode(event["delta"])) for event in deltas) == 67, "200 samples of 24 kHz"
        assert done["audio"]["output"]["format"] == kind


async def test_a_spoken_turn_is_found_and_answered(started: Started) -> None:
    async with started(echo, model=SPEC) as api, conversing(api) as client:
        assert client.events[0]["session"]["audio"]["input"]["turn_detection"]["type"] == "server_vad"
        await configure(client, turn_detection={"type": "server_vad", "silence_duration_ms": 320})
        await client.hear(spoken())
        begun = await client.until("input_audio_buffer.speech_started")
        ended = await client.until("input_audio_buffer.speech_stopped")
        done = (await client.until("response.done"))["response"]
        assert 200 <= begun["audio_start_ms"] <= 600 and 1200 <= ended["audio_end_ms"] <= 1700
        assert begun["item_id"] == ended["item_id"] == client.of("input_audio_buffer.committed")[0]["item_id"]
        assert done["status"] == "completed"
        samples = int(api.fake.prompt(api.fake.requests[0]).split()[1].partition("]")[0])
        length_ms = ended["audio_end_ms"] - begun["audio_start_ms"]
        assert abs(samples / 16 - length_ms) < 2
        text = (await api.client.get("/metrics")).text
        assert "mstar_realtime_first_audio_seconds_count 1.0" in text and "mstar_realtime_sessions 1.0" in text


async def test_two_turns_in_one_stream_are_two_items(started: Started) -> None:
    async with started(echo, model=SPEC) as api, conversing(api) as client:
        turns = {"type": "server_vad", "silence_duration_ms": 320, "create_response": False}
        await configure(client, turn_detection=turns)
        await client.hear(np.concatenate([spoken(), spoken(after_s=0.6)]))
        for _ in range(2):
            await client.until("input_audio_buffer.committed")
        assert [event["previous_item_id"] is None for event in client.of("input_audio_buffer.committed")] == [
            True,
            False,
        ]
        assert not api.fake.requests


def begin(fake: FakeDeployment, request: NewRequest) -> None:
    """Speak one second, and go on for ever."""
    fake.text(request.handle, b"one two three four")
    fake.audio(request.handle, RATE)


async def test_speech_interrupts_an_answer_which_is_cut_where_it_was_played(started: Started) -> None:
    scripts = iter((begin, echo))
    async with started(lambda fake, request: next(scripts)(fake, request), model=SPEC) as api:
        async with conversing(api) as client:
            turns = {"type": "server_vad", "silence_duration_ms": 320, "create_response": False}
            await configure(client, turn_detection=turns)
            await client.say("tell")
            await client.send("response.create")
            item_id = (await client.until("response.output_audio.delta"))["item_id"]
            assert news(api).speaks == "model"
            await client.hear(spoken())
            await client.until("input_audio_buffer.speech_started")
            assert (news(api).speaks, news(api).interrupts, news(api).answers) == ("interrupted", 1, 1)
            done = (await client.until("response.done"))["response"]
            assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "turn_detected")
            assert "input_audio_buffer.speech_stopped" not in client.kinds, "the answer ends before the turn"
            await client.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=500)
            await client.until("conversation.item.truncated")
            await api.fake.until(lambda: bool(api.fake.cancels))
            await client.respond(output_modalities=["text"])
            prompt = api.fake.prompt(api.fake.requests[1])
            assert prompt.startswith("<user>tell<assistant>one two <user>[audio"), prompt
            told = news(api)
            assert (told.speaks, told.items, told.request) == ("silence", 4, api.fake.requests[1].request_id)
            assert told.lease_s > 0 and told.used is not None and not told.running
        await api.until(lambda: not len(api.process.registry))
        assert "mstar_realtime_interrupts_total 1.0" in (await api.client.get("/metrics")).text


async def test_without_interrupts_the_answer_goes_on(started: Started) -> None:
    async with started(begin, model=SPEC) as api, conversing(api) as client:
        turns = {"type": "server_vad", "silence_duration_ms": 320, "interrupt_response": False}
        await configure(client, turn_detection=turns)
        await client.say("tell")
        await client.send("response.create")
        await client.until("response.output_audio.delta")
        await client.hear(spoken())
        await client.until("input_audio_buffer.committed")
        error = (await client.until("error"))["error"]
        assert error["code"] == "conversation_already_has_active_response"
        assert not api.fake.cancels


async def test_a_wrong_truncation_names_its_field(started: Started) -> None:
    wrong = ({"audio_end_ms": 1001}, {"audio_end_ms": -1}, {"content_index": 1}, {"item_id": "x"})
    async with started(begin, model=SPEC) as api, conversing(api) as client:
        await client.say("tell")
        await client.send("response.create")
        item_id = (await client.until("response.output_audio.delta"))["item_id"]
        for place in wrong:
            sent = {"item_id": item_id, "content_index": 0, "audio_end_ms": 1000, **place}
            assert (await client.refused("conversation.item.truncate", **sent))["param"] == next(iter(place))


async def test_sound_of_the_user_gets_a_transcript_beside_the_answer(started: Started) -> None:
    async with started(say(b" seven "), model=SPEC) as api, conversing(api) as client:
        await configure(client, turn_detection=None, transcription={"model": "any", "language": "en"})
        await client.hear(np.full(RATE, 500, np.int16))
        await client.send("input_audio_buffer.commit")
        event = await client.until("conversation.item.input_audio_transcription.completed")
        assert event["transcript"] == "seven" and event["usage"] == {"type": "duration", "seconds": 1.0}
        assert api.fake.prompt(api.fake.requests[0]) == "[audio 16000]Write down the English speech."
        await client.send("conversation.item.retrieve", item_id=event["item_id"])
        item = (await client.until("conversation.item.retrieved"))["item"]
        assert item["content"][0]["transcript"] == "seven"


async def test_words_shorten_the_silence_of_a_semantic_turn(started: Started) -> None:
    """The transcript at the pause ends a sentence, so a silence of 0.75 s ends a turn that waits for 1.5 s."""
    async with started(say(b"Seven."), model=SPEC) as api, conversing(api) as client:
        turns = {"type": "semantic_vad", "eagerness": "low", "create_response": False}
        await configure(client, turn_detection=turns, transcription={})
        await client.hear(spoken(after_s=0.3))
        await client.until("input_audio_buffer.speech_started")
        await api.fake.until(lambda: len(api.fake.requests) == 1)
        await api.clean()
        await client.hear(np.zeros(int(0.7 * RATE), np.int16))
        assert await client.until("input_audio_buffer.speech_stopped")
    async with started(say(b"Seven and"), model=SPEC) as api, conversing(api) as client:
        await configure(client, turn_detection={**turns, "eagerness": "high"}, transcription={})
        await client.hear(spoken(after_s=0.3))
        await client.until("input_audio_buffer.speech_started")
        await api.fake.until(lambda: len(api.fake.requests) == 1)
        await api.clean()
        await client.hear(np.zeros(int(0.2 * RATE), np.int16))
        await client.say("no end yet")
        assert "input_audio_buffer.speech_stopped" not in client.kinds


async def test_silence_behind_an_answer_makes_the_model_speak_again(started: Started) -> None:
    async with started(say(b"x"), model=SPEC) as api, conversing(api) as client:
        turns = {"type": "server_vad", "idle_timeout_ms": 1000}
        await configure(client, turn_detection=turns)
        await client.say("hi")
        await client.respond(output_modalities=["text"])
        await client.until("input_audio_buffer.timeout_triggered")
        await client.until("response.done")
        assert len(api.fake.requests) >= 2


async def test_sound_that_is_much_faster_than_time_is_refused_and_the_rest_is_heard(started: Started) -> None:
    async with started(echo, model=SPEC) as api, conversing(api) as client:
        await configure(client, turn_detection=None)
        minute = base64.b64encode(bytes(60 * 2 * RATE)).decode()
        for _ in range(4):
            await client.send("input_audio_buffer.append", audio=minute)
        await client.say("here")
        for _ in range(2):
            await client.send("input_audio_buffer.append", audio=minute)
        assert (await client.until("error"))["error"]["code"] == "audio_too_fast"
        await client.send("input_audio_buffer.commit")
        await client.until("input_audio_buffer.committed")


async def test_sessions_with_microphones_do_not_disturb_each_other(started: Started) -> None:
    async def turn(api: Api) -> str:
        async with conversing(api) as client:
            await client.hear(spoken())
            return str((await client.until("response.done"))["response"]["status"])

    async with started(echo, model=SPEC) as api:
        assert await asyncio.gather(*(turn(api) for _ in range(4))) == ["completed"] * 4
        await api.until(lambda: api.service_is_clean)


async def test_a_conversation_keeps_a_bounded_amount_of_sound(started: Started) -> None:
    async with started(echo, model=SPEC, max_audio_s=3.0) as api, conversing(api) as client:
        await configure(client, turn_detection=None)
        for _ in range(2):
            await client.hear(np.zeros(RATE, np.int16))
            await client.send("input_audio_buffer.commit")
        last = (await client.until("conversation.item.done", lambda e: e["previous_item_id"]))["item"]["id"]
        await client.hear(np.zeros(2 * RATE, np.int16))
        assert (await client.refused("input_audio_buffer.commit"))["code"] == "media_too_large"
        await client.send("conversation.item.delete", item_id=last)
        await client.until("conversation.item.deleted")
        await client.send("input_audio_buffer.commit")
        await client.until("input_audio_buffer.committed")
        for _ in range(3):
            await client.hear(np.zeros(RATE, np.int16), piece=RATE)
        assert (await client.refused("input_audio_buffer.append", audio=base64.b64encode(bytes(2 * RATE)).decode()))[
            "code"
        ] == "media_too_large"
