"""The Chat tab: thinking, calls of functions, JSON answers, adapters, and keys, in headless Chromium."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mstar_core.messages.requests import NewRequest
from mstar_core.plugin.chat.format import ChatFormat, Effort, ReasoningFormat, ToolFormat
from tests.api.live import live_api
from tests.fakes.conductor import FakeDeployment, say
from tests.fakes.omni_model import TEXT_ONLY
from tests.web.conftest import OpenTab, RunModule
from tests.web.devtools import Tab
from tests.web.test_page import button, check_fits, open_page
from tests.web.test_playground import send, turns, until_kept

browser = pytest.mark.browser

EFFORTS: dict[Effort, dict[str, Any]] = {"none": {"thinks": False}, "low": {"thinks": True}}
MODEL = replace(
    TEXT_ONLY,
    processor="tests.fakes.tool_model:Processor",
    chat=ChatFormat(
        tools=ToolFormat(begin="<tool_call>", end="</tool_call>"), reasoning=ReasoningFormat(efforts=EFFORTS)
    ),
)
CALL = (
    "<think>\nI need the weather.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
)
IDLE = "!document.querySelector('[aria-busy]') && !document.querySelector('.composer .primary').disabled"
OFFERING = """
const real = window.fetch;
window.bodies = [];
window.fetch = async (path, options) => {
  if (path === '/v1/models') {
    const found = await (await real(path, options)).json();
    found.data[0].capabilities.push('structured_outputs');
    found.data.push({ ...found.data[0], id: 'pirate', parent: found.data[0].id });
    return new Response(JSON.stringify(found));
  }
  if (path !== '/v1/chat/completions') return real(path, options);
  bodies.push(JSON.parse(options.body));
  const event = { choices: [{ delta: { content: '{"a_b":[1,2]}' } }] };
  return new Response(`data: ${JSON.stringify(event)}\\n\\ndata: [DONE]\\n\\n`);
};
"""
"""A server that serves an adapter and holds answers to JSON, so that the page does not depend on which model can."""


def calling(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: a call if the prompt has tools and no result yet, else the prompt."""
    prompt = fake.prompt(request)
    text = CALL if "{weather}" in prompt and "<tool>" not in prompt else prompt
    say(*(bytes([byte]) for byte in text.encode()))(fake, request)


def hanging(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: the beginning of an answer that does not end."""
    fake.text(request.handle, b"begun")


def field(label: str) -> str:
    """Return an expression for the control with a label."""
    return f"[...document.querySelectorAll('label')].find(e => e.textContent === {json.dumps(label)}).control"


def put(page: Tab, label: str, text: str) -> None:
    page.value(f"(e => {{ e.value = {json.dumps(text)}; e.dispatchEvent(new Event('change')); }})({field(label)})")


TOOLS = "Tools: functions as a JSON list"


@browser
@pytest.mark.parametrize("width", [1280, 390])
def test_calls_are_answered_in_the_page(width: int, tab: OpenTab) -> None:
    with live_api(calling, MODEL) as api:
        page = tab(width)
        open_page(page, api.url)
        put(page, TOOLS, "[{]")
        page.value("document.querySelector('.composer textarea').value = 'how is it in Ulm'")
        button(page, "Send")
        page.until("document.querySelector('form .error').textContent.startsWith('Tools: ')")
        assert turns(page) == []  # a request that cannot be made changes nothing
        button(page, "Example tools")
        send(page, "how is it in Ulm")
        assert page.value("document.querySelector('.call code').textContent") == "weather"
        assert page.value("document.querySelector('.call pre').textContent") == '{\n  "city": "Ulm"\n}'
        thinking = "document.querySelector('.turn.assistant details.thinking')"
        assert page.value(f"{thinking}.textContent") == "ThinkingI need the weather."
        assert page.value(f"{thinking}.open") is False
        assert page.value("document.activeElement.getAttribute('aria-label')") == "Result of weather"
        check_fits(page)
        page.value("document.querySelector('.composer textarea').value = 'never mind'")
        button(page, "Send")
        page.until("document.querySelector('form .error').textContent.includes('results of the calls')")
        page.click(".call textarea")
        page.type("rain")
        page.press("Enter")
        page.until("document.querySelectorAll('.turn').length === 3")
        page.until(IDLE)
        assert "<tool>" in turns(page)[-1] and "rain" in turns(page)[-1]
        assert "[weather" in turns(page)[-1]
        assert page.value("document.querySelectorAll('.call textarea').length") == 0
        code = page.value("document.querySelector('.snippet pre').textContent")
        assert '"tool_call_id"' in code and '"tools"' in code
        until_kept(page, "items.find(each => each.messages)?.messages.length === 3")
        open_page(page, api.url)
        page.until("document.querySelectorAll('.turn').length === 3")
        assert "weather" in page.value(f"{field(TOOLS)}.value")
        assert page.value("document.querySelectorAll('.call pre')[1].textContent") == "rain"
        check_fits(page)


@browser
def test_answers_are_held_to_a_schema_by_an_adapter(tab: OpenTab) -> None:
    with live_api(calling, MODEL) as api:
        page = tab(820)
        page.before_load(OFFERING)
        open_page(page, api.url)
        assert page.value(f"{field('JSON schema')}.closest('[hidden]') !== null")
        put(page, "Answer as", "json_schema")
        put(page, "JSON schema", '{"type": "object"}')
        put(page, "Model", "pirate")
        put(page, "Thinking", "low")
        send(page, "give me JSON")
        (body,) = page.value("bodies")
        assert body["response_format"] == {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
        }
        assert (body["model"], body["reasoning_effort"]) == ("pirate", "low")
        shown = "document.querySelector('.turn.assistant pre').textContent"
        assert page.value(shown) == '{\n  "a_b": [\n    1,\n    2\n  ]\n}'
        check_fits(page)
        put(page, "Answer as", "json_object")
        send(page, "again")
        assert page.value("bodies[1].response_format") == {"type": "json_object"}


@browser
def test_a_model_without_capabilities_has_no_controls_for_them(tab: OpenTab) -> None:
    with live_api(say(b"plain"), TEXT_ONLY) as api:
        page = tab(820)
        open_page(page, api.url)
        labels = page.value("[...document.querySelectorAll('form.chat label')].map(e => e.textContent)")
        assert not {"Thinking", "Answer as", "JSON schema", "Model", TOOLS} & set(labels)


@browser
def test_escape_stops_an_answer_and_it_can_be_generated_again(tab: OpenTab) -> None:
    with live_api(hanging, MODEL) as api:
        page = tab(820)
        open_page(page, api.url)
        page.click(".composer textarea")
        page.type("hello")
        page.press("Enter")
        page.until("document.querySelector('[aria-busy] > .words').textContent === 'begun'")
        page.press("Escape")
        page.until(IDLE)
        assert "Stopped." in page.value("document.querySelector('.turn.assistant').textContent")
        assert turns(page) == ["hello", "begun"]
        button(page, "Regenerate")
        page.until("document.querySelector('[aria-busy] > .words').textContent === 'begun'")
        button(page, "Stop")
        page.until(IDLE)


# -- modules that need no page -----------------------------------------------------------------------------------------


def test_pieces_of_calls_are_joined(run_module: RunModule) -> None:
    pieces = [
        [{"index": 0, "id": "a", "function": {"name": "one", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"x"'}}, {"index": 1, "id": "b", "function": {"name": "two"}}],
        [{"index": 0, "function": {"arguments": ": 1}"}}],
    ]
    found = run_module(
        "const { takeCalls, pretty } = await import(`${STATIC}/surfaces/chat/calls.js`);"
        f"const calls = []; for (const each of {json.dumps(pieces)}) takeCalls(calls, each);"
        "return [calls, pretty(calls[0].arguments), pretty('{\"x')];"
    )
    assert found[0] == [
        {"id": "a", "name": "one", "arguments": '{"x": 1}'},
        {"id": "b", "name": "two", "arguments": ""},
    ]
    assert found[1:] == ['{\n  "x": 1\n}', '{"x']


@pytest.mark.parametrize(
    "text, found",
    [
        ("", []),
        ('{"name": "a"}', [{"type": "function", "function": {"name": "a"}}]),
        ('[{"type": "function", "function": {"name": "b"}}]', [{"type": "function", "function": {"name": "b"}}]),
        ('[{"description": "no name"}]', "Tools: each needs a name"),
        ("3", "Tools: each needs a name"),
    ],
)
def test_tools_may_be_bare_or_as_the_route_has_them(text: str, found: Any, run_module: RunModule) -> None:
    assert (
        run_module(
            "const { toolsOf } = await import(`${STATIC}/surfaces/chat/controls.js`);"
            f"try {{ return toolsOf({json.dumps(text)}); }} catch (problem) {{ return problem.message; }}"
        )
        == found
    )


def test_results_follow_the_calls_that_they_answer(run_module: RunModule) -> None:
    answer = {
        "role": "assistant",
        "text": "",
        "reasoning": "hm",
        "calls": [{"id": "a", "name": "f", "arguments": "{}"}, {"id": "b", "name": "g", "arguments": "{}"}],
        "results": {"a": "1", "b": "2"},
    }
    found = run_module(
        "const { sent } = await import(`${STATIC}/surfaces/chat/messages.js`);"
        f"return [await sent({json.dumps(answer)}), await sent({{ role: 'user', text: 'hi' }})];"
    )
    message, *results = found[0]
    assert message["content"] is None and message["reasoning_content"] == "hm"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g"]
    assert [(each["role"], each["tool_call_id"], each["content"]) for each in results] == [
        ("tool", "a", "1"),
        ("tool", "b", "2"),
    ]
    assert found[1] == [{"role": "user", "content": "hi"}]
