"""The realtime client of `openai`: spoken and written turns, interrupts, functions, client secrets, errors."""

import asyncio
import base64
import json
import os
from contextlib import asynccontextmanager

import report
import spoken
from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
GREEDY = {"type": "realtime", "temperature": 0, "seed": 1, "talker_max_tokens": 40, "max_output_tokens": 8}
FRAME_MS, LIMIT_S = 80, 120
LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}


@asynccontextmanager
async def conversation(turns=None, client=CLIENT, **session):
    """Connect with greedy answers. turns: detection of turns."""
    async with client.realtime.connect(model=os.environ["MODEL"]) as connection:
        sound = {"input": {"turn_detection": turns}, "output": {"voice": "ethan"}}
        await connection.session.update(session={**GREEDY, "audio": sound, **session})
        yield connection


async def until(connection, kind):
    """Return all events up to the first of a type. An error ends the test."""
    events = []
    async with asyncio.timeout(LIMIT_S):
        async for event in connection:
            events.append(event)
            if event.type == kind:
                return events
            is_late = event.type == "error" and event.error.code == "response_cancel_not_active"  # it has ended
            assert event.type != "error" or is_late, event
    raise AssertionError("the connection was closed")


async def speak(connection):
    for piece in spoken.pieces(spoken.question()):
        await connection.input_audio_buffer.append(audio=base64.b64encode(piece).decode())


async def ask(connection):
    pcm = base64.b64encode(spoken.question(0.1, 0.1)).decode()
    content = [{"type": "input_audio", "audio": pcm}]
    await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})


def sound_of(events):
    deltas = [event.delta for event in events if event.type == "response.output_audio.delta"]
    return b"".join(map(base64.b64decode, deltas))


async def a_spoken_question_gets_a_spoken_answer():
    for turns in ({"type": "server_vad"}, {"type": "semantic_vad", "eagerness": "high"}):
        async with conversation(turns) as connection:
            await speak(connection)
            events = await until(connection, "response.done")
            assert events[-1].response.output[0].content[0].transcript.strip() == spoken.ANSWER
            assert spoken.heard(sound_of(events)) == spoken.ANSWER
            kinds = [event.type for event in events]
            assert kinds.index("input_audio_buffer.speech_started") < kinds.index("input_audio_buffer.speech_stopped")


async def a_committed_question_gets_a_written_answer_and_a_transcript():
    async with conversation(output_modalities=["text"]) as connection:
        await connection.session.update(
            session={"type": "realtime", "audio": {"input": {"transcription": {"model": "whisper-1"}}}}
        )
        pcm = base64.b64encode(spoken.question(0.1, 0.1)).decode()
        await connection.input_audio_buffer.append(audio=pcm)
        await connection.input_audio_buffer.commit()
        events = await until(connection, "conversation.item.input_audio_transcription.completed")
        assert events[-1].transcript
        await connection.response.create()
        events = await until(connection, "response.done")
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text.strip() == spoken.ANSWER


async def later_turns_read_earlier_ones_from_the_cache():
    async with conversation(output_modalities=["text"]) as connection:
        reads = []
        for _ in range(4):
            await ask(connection)
            await connection.response.create()
            usage = (await until(connection, "response.done"))[-1].response.usage
            reads.append((usage.input_tokens, usage.input_token_details.cached_tokens))
        assert reads == sorted(reads) and reads[-1][1] > 0, reads


async def an_answer_is_interrupted_and_cut_at_every_frame():
    for frames in range(8):
        async with conversation() as connection:
            await ask(connection)
            await connection.response.create()
            events = await until(connection, "response.output_audio.delta")
            await connection.response.cancel()
            events += await until(connection, "response.done")
            item_id = next(event.item_id for event in events if event.type == "response.output_audio.delta")
            played = min(frames * FRAME_MS, len(sound_of(events)) // 48)
            await connection.conversation.item.truncate(item_id=item_id, content_index=0, audio_end_ms=played)
            await until(connection, "conversation.item.truncated")
            await connection.conversation.item.retrieve(item_id=item_id)
            item = (await until(connection, "conversation.item.retrieved"))[-1].item
            said = item.content[0].transcript
            assert spoken.ANSWER.startswith(said.strip()), said
            await ask(connection)
            await connection.response.create()
            done = (await until(connection, "response.done"))[-1].response
            assert done.status == "completed", done


async def a_function_is_called_and_its_result_is_read():
    async with conversation(output_modalities=["text"], max_output_tokens=100) as connection:
        await ask(connection)
        await connection.response.create(
            response={"tools": [LOOK], "tool_choice": {"type": "function", "name": "look"}}
        )
        call = (await until(connection, "response.done"))[-1].response.output[0]
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look", {}), call
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "a red square"}
        await connection.conversation.item.create(item=result)
        await connection.response.create()
        assert (await until(connection, "response.done"))[-1].response.status == "completed"


async def a_client_secret_opens_a_session():
    made = await CLIENT.realtime.client_secrets.create(session={"type": "realtime", "output_modalities": ["text"]})
    browser = CLIENT.with_options(api_key=made.value)
    async with conversation(client=browser) as connection:
        await ask(connection)
        await connection.response.create()
        assert (await until(connection, "response.done"))[-1].response.output_modalities == ["text"]


async def a_wrong_event_gets_an_error_and_nothing_else_happens():
    async with conversation() as connection:
        await until(connection, "session.updated")
        await connection.send({"type": "response.creat", "event_id": "mine"})
        async for event in connection:
            if event.type == "error":
                assert (event.error.event_id, event.error.param) == ("mine", "type")
                break
        await ask(connection)
        await until(connection, "conversation.item.done")


report.run(
    [
        a_spoken_question_gets_a_spoken_answer,
        a_committed_question_gets_a_written_answer_and_a_transcript,
        later_turns_read_earlier_ones_from_the_cache,
        an_answer_is_interrupted_and_cut_at_every_frame,
        a_function_is_called_and_its_result_is_read,
        a_client_secret_opens_a_session,
        a_wrong_event_gets_an_error_and_nothing_else_happens,
    ]
)
