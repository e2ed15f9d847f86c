"""Parser of answers: content, thinking and calls, whatever the cuts of the text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mstar_core.plugin.chat.format import ChatFormat, ReasoningFormat, ToolFormat
from mstar_core.plugin.chat.parser import AnswerParser
from mstar_core.plugin.chat.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning, merged

THINK = ReasoningFormat()
HERMES = ChatFormat(tools=ToolFormat(begin="<tool_call>", end="</tool_call>"), reasoning=THINK)
MISTRAL = ChatFormat(tools=ToolFormat(begin="[TOOL_CALLS]", end="", is_list=True))
LLAMA = ChatFormat(tools=ToolFormat(begin="", end="", arguments_key="parameters"))
BARE_LIST = ChatFormat(tools=ToolFormat(begin="", end="", is_list=True))
TOOLS = ("add", "now")


def read(form: ChatFormat, pieces: Sequence[str], tools: Sequence[str] = TOOLS, **options: Any) -> list[Part]:
    """Return the joined parts of a text that arrives in pieces."""
    parser = AnswerParser(form, tools=tools, **options)
    return merged([*(part for piece in pieces for part in parser.push(piece)), *parser.flush()])


def call(index: int, name: str, arguments: str) -> list[Part]:
    return [CallBegin(index, name), CallArguments(index, arguments), CallEnd(index)]


ADD = '{"name": "add", "arguments": {"a": 1, "b": "}</tool_call>"}}'
ADD_CALL = call(0, "add", '{"a": 1, "b": "}</tool_call>"}')


def test_content_thinking_and_calls_are_told_apart() -> None:
    text = f"<think>\nTwo numbers.\n</think>\n\nLet me add.\n<tool_call>\n{ADD}\n</tool_call>"
    assert read(HERMES, [text]) == [Reasoning("Two numbers."), Content("Let me add."), *ADD_CALL]


def test_parallel_calls_are_numbered_and_space_between_them_is_left_out() -> None:
    text = f'<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>\n'
    assert read(HERMES, [text]) == [*ADD_CALL, *call(1, "now", "{}")]
    assert read(HERMES, [text], is_single=True) == ADD_CALL


def test_a_call_may_be_cut_within_its_escapes() -> None:
    arguments = r'{"a": "\\", "b": "\"}\\\"", "\u00e9": {"c": "é"}}'
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    for at in range(len(text)):
        assert read(HERMES, [text[:at], text[at:]]) == call(0, "add", arguments)


def test_text_behind_a_call_is_content_with_its_space() -> None:
    assert read(HERMES, [f"<tool_call>{ADD}</tool_call>\nThat is all. "]) == [*ADD_CALL, Content("\nThat is all.")]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "x"}, {"name": "now"}]'),
        (LLAMA, '\n{"type": "function", "name": "add", "parameters": {"a": 1}}\n{"name": "now", "parameters": {}}'),
        (BARE_LIST, '[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": "{}"}]'),
    ],
    ids=["mistral", "llama", "list"],
)
def test_calls_of_other_formats(form: ChatFormat, text: str) -> None:
    assert read(form, [text]) == [*call(0, "add", '{"a": 1}'), *call(1, "now", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call> is the marker of a call.",
        "<tool_call>[1, 2]</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": 1}',
        '<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call> end',
        '<tool_call>{"name": "add", "arguments": {"a": 1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": tru}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "not an object"}</tool_call>',
        '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"title": "a JSON text", "name": "add"}</tool_call>',
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "add", "arguments": ' + '{"a": ' * 33 + "1" + "}" * 33 + "}</tool_call>",
        '<tool_call>{"name": "add\\',
        "a < b, <tool_cal",
        "  \n",
        "",
    ],
)
def test_what_only_looks_like_a_call_stays_content(text: str) -> None:
    assert read(HERMES, [text]) == ([Content(text)] if text else [])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (MISTRAL, '[TOOL_CALLS]{"name": "add"}'),
        (MISTRAL, "[TOOL_CALLS][]"),
        (MISTRAL, "[TOOL_CALLS] [ "),
        (LLAMA, '{"answer": 42}'),
        (LLAMA, "{ no"),
        (LLAMA, 'The call is {"name": "add", "parameters": {}}'),
        (BARE_LIST, "[1, 2, 3]"),
    ],
)
def test_what_only_looks_like_a_call_of_other_formats_stays_content(form: ChatFormat, text: str) -> None:
    assert read(form, [text]) == [Content(text)]


def test_a_broken_call_does_not_hide_a_whole_one_behind_it() -> None:
    broken = '<tool_call>{"name": "add", "arguments": oops}</tool_call>'
    assert read(HERMES, [f"{broken}\n<tool_call>{ADD}</tool_call>"]) == [Content(broken), *ADD_CALL]


def test_a_broken_second_call_of_a_list_is_given_back_behind_the_first() -> None:
    text = '[TOOL_CALLS][{"name": "now"}, {"name": "sub"}]'
    assert read(MISTRAL, [text]) == [*call(0, "now", "{}"), Content(', {"name": "sub"}]')]


def test_without_tools_their_markers_are_content() -> None:
    text = f"<tool_call>{ADD}</tool_call> \n"
    assert read(HERMES, [text], tools=()) == [Content(text)]
    assert read(ChatFormat(), ["<think>a</think>b"]) == [Content("<think>a</think>b")]


@pytest.mark.parametrize(
    ("text", "begins_open", "parts"),
    [
        ("<think>\n\n</think>\n\nHi", False, [Content("Hi")]),
        ("<think>a\n\nb \n</think>", False, [Reasoning("a\n\nb")]),
        ("<think>cut </thi", False, [Reasoning("cut </thi")]),
        ("\na\n</think>\nHi", True, [Reasoning("a"), Content("Hi")]),
        ("<think>a</think>Hi", True, [Reasoning("a"), Content("Hi")]),
        ("never ends ", True, [Reasoning("never ends")]),
        ("Hi <think>a</think>", False, [Content("Hi <think>a</think>")]),
        (" Hi", False, [Content(" Hi")]),
        ("<thin", False, [Content("<thin")]),
    ],
)
def test_thinking_comes_before_the_answer(text: str, *, begins_open: bool, parts: list[Part]) -> None:
    assert read(HERMES, [text], begins_open=begins_open) == parts


def test_the_thinking_is_known_while_it_lasts() -> None:
    parser = AnswerParser(HERMES)
    seen = [bool(parser.push(piece)) or parser.is_thinking for piece in ("<think>", "a", "</think>")]
    assert (seen, parser.is_thinking) == ([True, True, False], False)
    assert AnswerParser(HERMES, begins_open=True).is_thinking


def test_arguments_that_a_grammar_holds_are_given_as_they_arrive() -> None:
    parser = AnswerParser(HERMES, tools=TOOLS, is_constrained=True)
    assert parser.push('<tool_call>{"name": "add", "argu') == []
    assert parser.push('ments": {"a": [{') == [CallBegin(0, "add"), CallArguments(0, '{"a": [{')]
    assert parser.push("}]}") == [CallArguments(0, "}]}")]
    assert parser.push("}\n</tool") == [CallEnd(0)]
    assert parser.push("_call>") == parser.flush() == []


def test_a_call_of_a_grammar_that_is_cut_off_has_no_end() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": "x'
    assert read(HERMES, [text], is_constrained=True) == [CallBegin(0, "add"), CallArguments(0, '{"a": "x')]


def test_a_call_without_a_grammar_is_given_when_it_is_complete() -> None:
    parser = AnswerParser(HERMES, tools=TOOLS)
    assert parser.push(f"<tool_call>{ADD[:-1]}") == []
    assert parser.push("}") == ADD_CALL


@pytest.mark.parametrize("text", ["<tool_call>{" * 20_000, '<tool_call>{"name": "' + '\\"a' * 100_000, "{" * 100_000])
def test_hostile_text_takes_linear_time(text: str) -> None:
    for form in (HERMES, LLAMA):
        kept = read(form, [text[at : at + 500] for at in range(0, len(text), 500)])
        assert kept == [Content(text)]


PIECES = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", "{", "}", ",", ":", '"', "\\"),
    *("\n", " ", "a", "é", "<", "1", '"name"', '"add"', '"now"', '"arguments"', '"parameters"', "Some words. "),
    *('"name": "add", "arguments": {"a": [1]}', '{"name": "now", "parameters": {"name": "x"}}', ADD),
)
OPTIONS: list[dict[str, Any]] = [
    {"begins_open": begins_open, "is_single": is_single, "is_constrained": is_constrained}
    for begins_open, is_single, is_constrained in itertools.product((False, True), repeat=3)
]


@settings(max_examples=400, deadline=None)
@given(
    form=st.sampled_from([HERMES, MISTRAL, LLAMA, BARE_LIST]),
    text=st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    options=st.sampled_from(OPTIONS),
)
@example(HERMES, f"<think>x</think> a\n<tool_call>\n{ADD}\n</tool_call>", [1], OPTIONS[0])
def test_a_text_gives_the_same_parts_however_it_is_cut(
    form: ChatFormat, text: str, cuts: list[int], options: dict[str, Any]
) -> None:
    pieces, at = [], 0
    for size in itertools.cycle(cuts):
        if at >= len(text):
            break
        pieces.append(text[at : at + size])
        at += size
    whole = read(form, [text], **options)
    assert read(form, pieces, **options) == whole
    assert read(form, list(text), **options) == whole
    for part in whole:
        if isinstance(part, CallArguments) and CallEnd(part.index) in whole and not options["is_constrained"]:
            assert isinstance(json.loads(part.text), dict)
    has_thought = form.reasoning is not None and (options["begins_open"] or text.lstrip().startswith("<think>"))
    if not has_thought and not any(isinstance(part, CallBegin) for part in whole):
        assert whole == ([Content(text)] if text else [])
