"""An agent of openai-agents with two tools, over chat completions and over responses: calls and answers are exact."""

import json
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


@function_tool(description_override="Weather of a city")
def get_weather(city: str) -> str:
    CALLS.append(("get_weather", city))
    return json.dumps({"result": "foggy"})


@function_tool(description_override="Start a timer")
def set_timer(minutes: int) -> str:
    CALLS.append(("set_timer", minutes))
    return json.dumps({"result": "started"})


def agent(kind, choice):
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
    settings = ModelSettings(max_tokens=400, temperature=0, tool_choice=choice, parallel_tool_calls=False)
    model, tools = kind(os.environ["MODEL"], client), [get_weather, set_timer]
    return Agent(
        name="helper", instructions="You are a helpful assistant.", tools=tools, model=model, model_settings=settings
    )


async def _answers(kind):
    CALLS.clear()
    result = await Runner.run(agent(kind, None), "What is the weather in Oslo?", max_turns=4)
    assert CALLS == [("get_weather", "Oslo")], CALLS
    assert result.final_output == "The weather in Oslo is foggy.", result.final_output
    assert result.raw_responses and result.raw_responses[0].usage.total_tokens > 0


async def _streams(kind):
    CALLS.clear()
    run = Runner.run_streamed(agent(kind, "required"), "Set a timer for 12 minutes.", max_turns=4)
    kinds = [event.type async for event in run.stream_events()]
    assert CALLS == [("set_timer", 12)], CALLS
    assert run.final_output == "The timer of 12 minutes has started.", run.final_output
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
