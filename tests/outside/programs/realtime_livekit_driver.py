"""The realtime model of livekit-plugins-openai: a spoken question, an interrupt, a function."""

import asyncio
import os
from contextlib import asynccontextmanager

import aiohttp
import report
import spoken
from livekit import rtc
from livekit.agents import llm
from livekit.plugins import openai
from openai.types.realtime.realtime_audio_input_turn_detection import ServerVad

LIMIT_S = 120


@asynccontextmanager
async def session_of(**options):
    """Open a session. The library takes a session of HTTP from its job, which there is none of here."""
    async with aiohttp.ClientSession() as http:
        turns = ServerVad(type="server_vad", create_response=True, interrupt_response=True)
        model = openai.realtime.RealtimeModel(
            base_url=os.environ["BASE_URL"],
            api_key="none",
            model=os.environ["MODEL"],
            voice="ethan",
            turn_detection=turns,
            http_session=http,
            **options,
        )
        session = model.session()
        errors, generations = [], asyncio.Queue()
        session.on("error", errors.append)
        session.on("generation_created", generations.put_nowait)
        try:
            yield session, generations, errors
        finally:
            await session.aclose()
            await model.aclose()
        assert not errors, errors


def push(session):
    for piece in spoken.pieces(spoken.question()):
        frame = rtc.AudioFrame(data=piece, sample_rate=spoken.RATE, num_channels=1, samples_per_channel=len(piece) // 2)
        session.push_audio(frame)


async def answer_of(generation):
    """Return the text and the sound of the first message of a generation."""
    async for message in generation.message_stream:

        async def text(message=message):
            return "".join([str(part) async for part in message.text_stream])

        async def sound(message=message):
            return b"".join([bytes(frame.data) async for frame in message.audio_stream])

        return await asyncio.gather(text(), sound())
    raise AssertionError("the generation has no message")


async def a_spoken_question_gets_a_spoken_answer():
    async with asyncio.timeout(LIMIT_S), session_of() as (session, generations, _):
        push(session)
        text, sound = await answer_of(await generations.get())
        assert text.strip() == spoken.ANSWER
        assert spoken.heard(sound) == spoken.ANSWER


async def an_answer_is_interrupted_and_truncated_and_the_next_one_is_whole():
    async with asyncio.timeout(LIMIT_S), session_of() as (session, generations, _):
        push(session)
        generation = await generations.get()
        message = await anext(aiter(generation.message_stream))
        await anext(aiter(message.audio_stream))
        session.interrupt()
        session.truncate(message_id=message.message_id, modalities=["audio"], audio_end_ms=80, audio_transcript="")
        push(session)
        text, sound = await answer_of(await generations.get())
        assert text.strip() and sound


async def a_function_is_called():
    @llm.function_tool
    async def look() -> str:
        """Look at the picture."""
        return "a red square"

    async with asyncio.timeout(LIMIT_S), session_of(tool_choice="required") as (session, generations, _):
        await session.update_tools([look])
        push(session)
        generation = await generations.get()
        call = await anext(aiter(generation.function_stream))
        assert call.name == "look"


report.run(
    [
        a_spoken_question_gets_a_spoken_answer,
        an_answer_is_interrupted_and_truncated_and_the_next_one_is_whole,
        a_function_is_called,
    ]
)
