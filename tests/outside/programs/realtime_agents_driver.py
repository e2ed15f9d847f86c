"""A realtime agent of openai-agents: a spoken question, a written one, a function."""

import asyncio
import os

import report
import spoken
from agents import function_tool, set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeRunner

set_tracing_disabled(True)
URL = os.environ["BASE_URL"].replace("http", "ws") + f"/realtime?model={os.environ['MODEL']}"
TURNS = {"type": "server_vad", "interrupt_response": True}
LIMIT_S = 120
CALLS = []


@function_tool
def look() -> str:
    """Look at the picture."""
    CALLS.append("look")
    return "a red square"


async def session_of(tools=(), **settings):
    runner = RealtimeRunner(RealtimeAgent(name="helper", instructions="Answer.", tools=list(tools)))
    config = {
        "api_key": "none",
        "url": URL,
        "initial_model_settings": {"voice": "ethan", "turn_detection": TURNS, **settings},
    }
    return await runner.run(model_config=config)


async def events_until(session, kind):
    events = []
    async with asyncio.timeout(LIMIT_S):
        async for event in session:
            events.append(event)
            assert event.type != "error", event
            if event.type == kind:
                return events
    raise AssertionError("the session ended")


async def a_spoken_question_gets_a_spoken_answer():
    async with await session_of() as session:
        for piece in spoken.pieces(spoken.question()):
            await session.send_audio(piece)
        events = await events_until(session, "audio_end")
        sound = b"".join(event.audio.data for event in events if event.type == "audio")
        assert spoken.heard(sound) == spoken.ANSWER


async def a_message_is_answered_and_stands_in_the_history():
    async with await session_of(modalities=["text"]) as session:
        await session.send_message("Which digit do you hear?")
        await events_until(session, "agent_end")
        await asyncio.sleep(0)
        roles = [item.role for item in session._history if item.type == "message"]
        assert roles == ["user", "assistant"], roles


async def a_function_is_called():
    choice = {"type": "function", "name": "look"}
    async with await session_of([look], modalities=["text"], tool_choice=choice) as session:
        await session.send_message("Which digit do you hear?")
        events = await events_until(session, "tool_end")
        assert CALLS[0] == "look" and events[-1].output == "a red square"


report.run(
    [a_spoken_question_gets_a_spoken_answer, a_message_is_answered_and_stands_in_the_history, a_function_is_called]
)
