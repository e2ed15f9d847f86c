"""Forms of answers: their fields on every text route, and what is refused at once, without a wait for others."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import llguidance
import openai

from mstar_core.api.parse.constraint import MOST_BYTES, MOST_CHOICES, MOST_REGEX_BYTES
from mstar_core.plugin.chat.format import ChatFormat, ToolFormat
from tests.api.conftest import Api, Started
from tests.api.test_chat import HI, PATH
from tests.api.test_chat_tools import ADD, ASK, HELD, MODEL, OPEN, HeldParams, tool
from tests.constraints.test_tool_calls import BYTES
from tests.fakes.conductor import echo
from tests.fakes.omni_model import SPEC
from tests.fakes.token_model import SPEC as TOKENS
from tests.fakes.token_model import serve

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
LARK = 'start: "a" b\nb: /[0-9]+/\n'


def schema(rules: dict[str, Any] = NUMBER, **changes: Any) -> dict[str, Any]:
    """Return a response format with a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": rules, **changes}}


def admits(constraint: str | None, text: str) -> bool:
    """Return whether a whole answer obeys a constraint."""
    assert constraint is not None
    matcher = llguidance.LLMatcher(BYTES.tokenizer, constraint)
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


async def constraint(api: Api, path: str, body: dict[str, Any]) -> str | None:
    """Return the grammar with which a request reaches the engine."""
    answer = await api.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    held = api.fake.requests[-1].params["constraint"]
    assert held is None or isinstance(held, str)
    return held


FORMS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "object": ({"response_format": {"type": "json_object"}}, ["{}", '{"b": [1, null]}'], ["[]", "Hello", "{} x"]),
    "schema": ({"response_format": schema(strict=True)}, ['{"a": 1}', '{\n    "a": 1\n}'], ["{}", '{"a": "x"}']),
    "lenient": ({"response_format": schema({"type": "array", "uniqueItems": True})}, ["[1, 1]"], ["{}"]),
    "grammar": ({"grammar": LARK}, ["a1", "a42"], ["a", "b1", "a1 "]),
    "regex": ({"regex": r"\d{2}/[a-z]+"}, ["12/ab"], ["12", "12/", "x12/a", "٣٤/a"]),
    "choice": ({"choice": ["yes", "yes it is", 'é"\n😀', "yes"]}, ["yes", "yes it is", 'é"\n😀'], ["no", "yes it"]),
}


async def test_every_text_route_holds_the_answer_to_the_form(started: Started) -> None:
    async with started(echo, model=HELD) as api:
        for fields, good, bad in FORMS.values():
            bodies = [(PATH, {**HI, **fields}), ("/generate", {"text": "hi", "streaming": False, **fields})]
            bodies.append(("/generate", {"text": "hi", "streaming": False, "model_kwargs": fields}))
            if form := fields.get("response_format"):
                flat = {"type": form["type"], **form.get("json_schema", {})}
                bodies.append(("/v1/responses", {"input": "hi", "text": {"format": flat}}))
            for path, body in bodies:
                held = await constraint(api, path, body)
                for text in good:
                    assert admits(held, text) and admits(held, f"<think>so\n</think>\n\n{text}"), (path, text)
                for text in bad:
                    assert not admits(held, text), (path, text)


async def test_completions_have_the_form_without_thinking(started: Started) -> None:
    async with started(serve, model=replace(TOKENS, params=HeldParams, nodes=HELD.nodes)) as api:
        for fields, good, bad in FORMS.values():
            held = await constraint(api, "/v1/completions", {"prompt": "hi", "n": 2, **fields})
            assert all(admits(held, text) for text in good) and not any(admits(held, text) for text in bad)
            assert not admits(held, f"<think>so</think>\n\n{good[0]}")


async def test_forms_send_lists_and_formats_as_json(started: Started) -> None:
    async with started(echo, model=HELD) as api:
        for fields in ({"choice": '["yes", "no"]'}, {"response_format": json.dumps(schema())}, {"regex": "yes|no"}):
            answer = await api.client.post("/generate", data={"text": "hi", "streaming": "false", **fields})
            assert answer.status_code == 200, answer.text
            held = api.fake.requests[-1].params["constraint"]
            assert admits(held, '{"a": 1}' if "response_format" in fields else "yes")


async def test_answers_of_any_text_have_no_grammar(started: Started) -> None:
    async with started(echo, model=HELD) as api:
        for body in (HI, {**HI, "response_format": {"type": "text"}}, {**HI, "response_format": None, "choice": None}):
            assert await constraint(api, PATH, body) is None
        assert await constraint(api, "/v1/responses", {"input": "a", "text": {"format": {"type": "text"}}}) is None


async def test_beside_tools_the_answer_is_in_the_form_or_calls(started: Started) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    async with started(echo, model=HELD) as api:
        strict = tool(strict=True, parameters=NUMBER)
        held = await constraint(api, PATH, {**HI, "tools": [strict], "response_format": schema()})
        for text in ('{"a": 5}', call, f"<think>a</think>{call}", f"{call}\n{call}"):
            assert admits(held, text), text
        for text in ("Hello", f'{{"a": 5}}{call}', call.replace("1", '"x"'), ""):
            assert not admits(held, text), text
        none = await constraint(api, PATH, {**ASK, "tool_choice": "none", "choice": ["yes"]})
        assert admits(none, "yes") and not admits(none, call)


async def test_thinking_leaves_room_for_what_is_held(started: Started) -> None:
    """It ends after 2 characters per token of the limit, whether a form or calls follow it."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    forced = {"tools": [tool(parameters=NUMBER)], "tool_choice": "required"}
    for model, begin in ((HELD, "<think>"), (replace(HELD, chat=OPEN.chat), "")):
        async with started(echo, model=model) as api:
            for fields, end in (({"regex": "[0-9]{2}"}, "12"), (forced, call)):
                held = await constraint(api, PATH, {**HI, **fields, "max_tokens": 10})
                for count in (0, 20):
                    assert admits(held, f"{begin}{'é' * count}</think>{end}")
                assert not admits(held, f"{begin}{'é' * 21}</think>{end}")
                assert admits(held, f"{begin}</thin</think>{end}"), "what looks like an end is thinking"


async def test_without_effort_what_is_held_has_no_thinking(started: Started) -> None:
    for model in (HELD, replace(HELD, chat=OPEN.chat)):
        async with started(echo, model=model) as api:
            held = await constraint(api, PATH, {**HI, "regex": "[0-9]{2}", "reasoning_effort": "none"})
            assert admits(held, "12") and not admits(held, "<think>a</think>12") and not admits(held, "a</think>12")
            body = {"input": "hi", "text": {"format": OBJECT}, "reasoning": {"effort": "none"}}
            assert not admits(await constraint(api, "/v1/responses", body), "<think>a</think>{}")


async def test_a_form_that_is_slow_to_check_delays_no_other(started: Started) -> None:
    async with started(echo, model=HELD) as api:
        slow = asyncio.create_task(api.client.post(PATH, json={**HI, "response_format": schema(LOOP)}))
        for number in range(3):
            assert (await api.client.post(PATH, json={**HI, "choice": [f"a{number}"]})).status_code == 200
            assert not slow.done()
        assert (await slow).status_code == 400


async def test_the_openai_client_parses_an_answer_into_its_model(started: Started) -> None:
    def script(fake: Any, request: Any) -> None:
        fake.text(request.handle, b'{"a": 7}')
        fake.finish(request.handle)

    async with started(script, model=HELD) as api:
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="any", max_retries=0) as client:
            call: dict[str, Any] = {"model": "fake", "messages": HI["messages"]}
            answer = await client.chat.completions.create(**call, response_format=schema(strict=True))  # type: ignore[arg-type]
            flat = {"type": "json_schema", "name": "answer", "schema": NUMBER, "strict": True}
            response = await client.responses.create(model="fake", input="hi", text={"format": flat})  # type: ignore[typeddict-item]
        assert json.loads(answer.choices[0].message.content or "") == {"a": 7} == json.loads(response.output_text)
        assert response.text is not None and response.text.format is not None
        echoed = response.text.format.to_dict()
        assert echoed == {**flat, "description": None}


async def test_a_form_holds_text_that_is_spoken_but_no_image_and_no_audio_alone(started: Started) -> None:
    everything = replace(SPEC, params=HeldParams, nodes=HELD.nodes)
    async with started(echo, model=everything) as api:
        body = {"text": "hi", "streaming": False, "regex": "[0-9]{2}"}
        assert admits(await constraint(api, "/generate", {**body, "output_modalities": ["text", "audio"]}), "12")
        for outputs, word in ((["text", "image"], "image"), (["audio"], "needs text"), (["image"], "needs text")):
            answer = await api.client.post("/generate", json={**body, "output_modalities": outputs})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "unsupported_parameter") and "regex" in str(error), (
                error
            )
            assert word in error["message"]


LOOP = {"allOf": [{"type": "string", "pattern": f"a.{{{count}}}b"} for count in range(40)]}
"""A schema with which the compiler does not finish."""

UNSATISFIABLE = {"type": "integer", "minimum": 5, "maximum": 3}
NAMED = {"type": "function", "function": {"name": "add"}}
OBJECT = {"type": "json_object"}
INNER = "response_format.json_schema"

REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"response_format": {"type": "xml"}}, 400, "response_format.type", "json_schema"),
    ({"response_format": "json"}, 400, "response_format", ""),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, 400, f"{INNER}.name", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, 400, f"{INNER}.schema", "missing"),
    ({"response_format": schema(name="a b")}, 400, f"{INNER}.name", "a-z"),
    ({"response_format": schema([], strict=True)}, 400, f"{INNER}.schema", "object"),  # type: ignore[arg-type]
    ({"response_format": schema({"type": "x"})}, 400, f"{INNER}.schema", "json_object"),
    ({"response_format": schema(UNSATISFIABLE)}, 400, f"{INNER}.schema", "greater than maximum"),
    ({"response_format": schema({"$ref": "http://a.example/b"})}, 400, f"{INNER}.schema", "a.example"),
    ({"response_format": schema({"type": "string", "pattern": "(["})}, 400, f"{INNER}.schema", "unclosed"),
    ({"response_format": schema({"uniqueItems": True}, strict=True)}, 400, f"{INNER}.schema", "omit strict"),
    ({"response_format": schema({"format": "x"}, strict=True)}, 400, f"{INNER}.schema", "omit strict"),
    ({"response_format": schema({"oneOf": [{}, {}]}, strict=True)}, 400, f"{INNER}.schema", "omit strict"),
    ({"response_format": schema(LOOP)}, 400, f"{INNER}.schema", "in time"),
    ({"response_format": schema({"const": "x" * MOST_BYTES})}, 413, f"{INNER}.schema", "bytes"),
    ({"grammar": ""}, 400, "grammar", "empty"),
    ({"grammar": 'begin: "a"'}, 400, "grammar", "no start rule"),
    ({"grammar": 'start: "a"\nb: ('}, 400, "grammar", "2("),
    ({"grammar": 'root ::= "a" | "b"'}, 400, "grammar", "GBNF"),
    ({"grammar": 'start: A\nA: "a" & "b"'}, 400, "grammar", "no text"),
    ({"grammar": "start: <|other|>"}, 400, "grammar", "special token"),
    ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, 400, "grammar", "nested"),
    ({"grammar": f'start: "{"a" * MOST_BYTES}"'}, 413, "grammar", "bytes"),
    ({"grammar": 5}, 400, "grammar", ""),
    ({"regex": ""}, 400, "regex", "empty"),
    ({"regex": "a("}, 400, "regex", "unclosed"),
    ({"regex": "(?=a)b"}, 400, "regex", "look-around"),
    ({"regex": r"(a)\1"}, 400, "regex", "backreferences"),
    ({"regex": "a" * (MOST_REGEX_BYTES + 1)}, 413, "regex", "bytes"),
    ({"choice": []}, 400, "choice", "1 to"),
    ({"choice": "yes"}, 400, "choice", ""),
    ({"choice": ["yes", ""]}, 400, "choice[1]", "empty"),
    ({"choice": ["yes", 5]}, 400, "choice[1]", ""),
    ({"choice": [f"{number}" for number in range(MOST_CHOICES + 1)]}, 400, "choice", "1 to"),
    ({"response_format": OBJECT, "grammar": LARK}, 400, "grammar", "contradicts"),
    ({"response_format": OBJECT, "choice": ["a"]}, 400, "choice", "contradicts"),
    ({"regex": "a", "choice": ["a"]}, 400, "choice", "contradicts"),
    ({"regex": "a", "ignore_eos": True}, 400, "ignore_eos", "regex"),
    ({"response_format": OBJECT, "tool_choice": "required"}, 400, "tool_choice", "tools"),
    ({"response_format": OBJECT, "tools": [ADD], "tool_choice": "required"}, 400, "response_format", "auto"),
    ({"response_format": schema(), "tools": [ADD], "tool_choice": NAMED}, 400, "response_format", "auto"),
    ({"regex": "a", "tools": [ADD]}, 400, "regex", "none"),
    (
        {"tools": [ADD, tool(name="b", strict=True, parameters={**NUMBER, "allOf": LOOP["allOf"]})]},
        400,
        "tools[1].function.parameters",
        "simplify",
    ),
]


async def test_what_cannot_hold_an_answer_is_refused_with_its_field_while_others_go_on(started: Started) -> None:
    async with started(echo, model=HELD) as api:
        sent = asyncio.gather(*(api.client.post(PATH, json={**HI, **body}) for body, *_ in REFUSED))
        others = 0
        while not sent.done():
            assert (await api.client.post(PATH, json=HI)).status_code == 200
            others += 1
        wrong = []
        for (body, *expected, word), answer in zip(REFUSED, await sent, strict=True):
            error = answer.json().get("error", {"param": "", "message": ""})
            if [answer.status_code, error["param"]] != expected or word not in error["message"]:
                wrong.append(f"{json.dumps(body)[:160]} {expected} {word!r}: {answer.status_code} {error}")
        assert not wrong, "\n".join(wrong)
        assert others > 1
        await api.clean()


async def test_responses_name_their_own_fields(started: Started) -> None:
    async with started(echo, model=HELD) as api:
        odd = {"type": "json_schema", "name": "a", "schema": {"uniqueItems": True}, "strict": True}
        for form, field in (
            (odd, "text.format.schema"),
            ({**odd, "name": "a b"}, "text.format.name"),
            ({"type": "xml"}, "text.format.type"),
            ({"type": "json_schema", "name": "a"}, "text.format.schema"),
        ):
            answer = await api.client.post("/v1/responses", json={"input": "a", "text": {"format": form}})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field), error
        tools = [{"type": "function", "name": "add"}]
        body = {"input": "a", "text": {"format": OBJECT}, "tools": tools, "tool_choice": "required"}
        error = (await api.client.post("/v1/responses", json=body)).json()["error"]
        assert (error["param"], "omit text.format" in error["message"]) == ("text.format", True)


async def test_a_form_is_refused_where_calls_look_like_json(started: Started) -> None:
    model = replace(HELD, chat=ChatFormat(tools=ToolFormat(begin="", end="")))
    async with started(echo, model=model) as api:
        answer = await api.client.post(PATH, json={**ASK, "response_format": OBJECT})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "response_format", "unsupported_parameter")


async def test_a_form_is_refused_by_a_model_without_the_capability(started: Started) -> None:
    async with started(echo, model=MODEL) as api:
        for fields in ({"response_format": OBJECT}, {"grammar": LARK}, {"regex": "a"}, {"choice": ["a"]}):
            (field,) = fields
            for path, body in ((PATH, HI), ("/generate", {"text": "hi"})):
                answer = await api.client.post(path, json={**body, **fields})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"], error["code"]) == (400, field, "unsupported_parameter")
                assert "structured_outputs" in error["message"]
