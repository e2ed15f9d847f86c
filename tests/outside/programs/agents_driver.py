"""An agent of openai-agents with two tools, over chat completions and over responses."""

import os

import report
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
CALLS = []


@function_tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    CALLS.append(("weather", city))
    return f"It is sunny in {city}."


@function_tool
def add(a: int, b: int) -> int:
    """Return the sum of two numbers."""
    CALLS.append(("add", a, b))
    return a + b


def agent(kind):
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
    settings = ModelSettings(max_tokens=400, tool_choice="required", parallel_tool_calls=False)
    model = kind(os.environ["MODEL"], client)
    return Agent(name="helper", instructions="Use a tool.", tools=[weather, add], model=model, model_settings=settings)


async def _answers(kind):
    CALLS.clear()
    result = await Runner.run(agent(kind), "What is the weather in Oslo?", max_turns=4)
    assert CALLS, "no tool was called"
    assert result.raw_responses and result.raw_responses[0].usage.total_tokens > 0


async def _streams(kind):
    CALLS.clear()
    run = Runner.run_streamed(agent(kind), "Add 2 and 3.", max_turns=4)
    kinds = [event.type async for event in run.stream_events()]
    assert CALLS, "no tool was called"
    assert "raw_response_event" in kinds and "run_item_stream_event" in kinds


async def chat_calls_a_tool_and_answers():
    await _answers(OpenAIChatCompletionsModel)


async def chat_streams_a_call_and_an_answer():
    await _streams(OpenAIChatCompletionsModel)


async def responses_call_a_tool_and_answer():
    await _answers(OpenAIResponsesModel)


async def responses_stream_a_call_and_an_answer():
    await _streams(OpenAIResponsesModel)


report.run(
    [
        chat_calls_a_tool_and_answers,
        chat_streams_a_call_and_an_answer,
        responses_call_a_tool_and_answer,
        responses_stream_a_call_and_an_answer,
    ]
)
