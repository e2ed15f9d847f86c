"""Grammars of tool calls: what each choice of tools admits, in every format, and that the parser reads it as calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mstar_core.constraints.answers import of_answer
from mstar_core.constraints.checker import GrammarChecker
from mstar_core.constraints.tool_calls import MOST_CALLS
from mstar_core.constraints.vocabulary import TokenTable
from mstar_core.plugin.chat.format import ChatFormat, ReasoningFormat, ToolFormat
from mstar_core.plugin.chat.parser import AnswerParser
from mstar_core.plugin.chat.parts import CallBegin
from mstar_core.plugin.chat.turns import Tool, ToolChoice

llguidance = pytest.importorskip("llguidance")

BYTES = TokenTable([bytes([byte]) for byte in range(256)] + [b"<|end|>"], special=[256], ends=[256])
HERMES = ChatFormat(tools=ToolFormat(begin="<tool_call>", end="</tool_call>"), reasoning=ReasoningFormat())
PLAIN = ChatFormat(tools=HERMES.tools)
MISTRAL = ChatFormat(tools=ToolFormat(begin="[TOOL_CALLS]", end="", is_list=True))
LLAMA = ChatFormat(tools=ToolFormat(begin="", end="", arguments_key="parameters"))
FORMS = {"hermes": HERMES, "plain": PLAIN, "mistral": MISTRAL, "llama": LLAMA}

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ADD = Tool(name="add", parameters=NUMBER, strict=True)
NOW = Tool(name="now")
TOOLS = (ADD, NOW)
REQUIRED, AUTO = ToolChoice(mode="required"), ToolChoice()


def of_tool_calls(form: ChatFormat, tools: Sequence[Tool], choice: ToolChoice, *, begins_open: bool = False) -> str:
    return of_answer(form, tools=tools, choice=choice, begins_open=begins_open)


def problem_of(grammar: str) -> str:
    return GrammarChecker(None, {}).problem(grammar)


def admits(grammar: str, text: str) -> bool:
    """Return whether a whole answer obeys a grammar."""
    assert problem_of(grammar) == ""
    matcher = llguidance.LLMatcher(BYTES.tokenizer, grammar)
    return bool(matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting())


def calls(form: ChatFormat, *made: tuple[str, str]) -> str:
    """Return calls as a model of this form writes them."""
    assert form.tools is not None
    texts = [f'{{"name": "{name}", "{form.tools.arguments_key}": {arguments}}}' for name, arguments in made]
    if form.tools.is_list:
        return f"{form.tools.begin} [{', '.join(texts)}]"
    space = "\n" if form.tools.begin else ""
    return "\n".join(f"{form.tools.begin}{space}{text}{space}{form.tools.end}" for text in texts)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_required_answer_is_calls_alone(form: ChatFormat) -> None:
    grammar = of_tool_calls(form, TOOLS, REQUIRED)
    one, both = calls(form, ("add", '{"a": 1}')), calls(form, ("add", '{"a": 1}'), ("now", "{}"))
    assert admits(grammar, one) and admits(grammar, both)
    for text in ("", "Hello", f"Hello {one}", f"{one} Hello", one[:-1] if form.tools and form.tools.end else one[:-2]):
        assert not admits(grammar, text), text
    for name, arguments in (("add", "{}"), ("add", '{"a": "x"}'), ("add", '{"a": 1, "b": 2}'), ("sub", "{}")):
        assert not admits(grammar, calls(form, (name, arguments)))
    for text in (one, both):
        parser = AnswerParser(form, tools=("add", "now"))
        assert sum(isinstance(part, CallBegin) for part in (*parser.push(text), *parser.flush())) == 1 + (text == both)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_one_call_is_all_that_a_named_tool_or_no_parallel_calls_admit(form: ChatFormat) -> None:
    now, both = calls(form, ("now", "{}")), calls(form, ("now", "{}"), ("now", "{}"))
    named, required = ToolChoice(mode="named", name="now"), ToolChoice(mode="required", parallel=False)
    for choice in (named, required, ToolChoice(parallel=False)):
        grammar = of_tool_calls(form, TOOLS, choice)
        assert admits(grammar, now) and not admits(grammar, both)
    assert not admits(
        of_tool_calls(form, TOOLS, ToolChoice(mode="named", name="now")), calls(form, ("add", '{"a": 1}'))
    )


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_answer_of_its_own_choice_is_text_or_valid_calls(form: ChatFormat) -> None:
    grammar = of_tool_calls(form, TOOLS, AUTO)
    for text in ("", "Hello {world} [1] <b>", calls(form, ("add", '{"a": 1}')), calls(form, ("now", '{"b": 1}'))):
        assert admits(grammar, text), text
    assert not admits(grammar, calls(form, ("add", '{"a": "x"}')))
    begin = form.tools.begin if form.tools is not None and form.tools.begin else "{"
    assert not admits(grammar, f"{begin} oops")
    if form.tools is not None and form.tools.begin:
        assert admits(grammar, f"Well. {calls(form, ('now', '{}'))}")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("choice", [REQUIRED, AUTO], ids=["required", "auto"])
def test_the_number_of_calls_is_bounded(form: ChatFormat, choice: ToolChoice) -> None:
    grammar = of_tool_calls(form, TOOLS, choice)
    assert admits(grammar, calls(form, *[("add", '{"a": 1}')] * MOST_CALLS))
    assert not admits(grammar, calls(form, *[("add", '{"a": 1}')] * (MOST_CALLS + 1)))


def test_thinking_comes_before_calls() -> None:
    call = calls(HERMES, ("now", "{}"))
    required = of_tool_calls(HERMES, TOOLS, REQUIRED)
    assert admits(required, f"<think>\na < b\n</think>\n\n{call}")
    assert not admits(required, f"<think>\na < b\n{call}")
    assert not admits(of_tool_calls(PLAIN, TOOLS, REQUIRED), f"<think>a</think>{call}")
    within = of_tool_calls(HERMES, TOOLS, REQUIRED, begins_open=True)
    assert admits(within, f"a\n</think>\n{call}") and not admits(within, call)
    assert admits(of_tool_calls(HERMES, TOOLS, AUTO), f"<think>a</think>\n\nHi\n{call}")


def test_unknown_keywords_are_a_problem_of_strict_tools_alone() -> None:
    odd = {"type": "object", "properties": {"a": {"not": {"type": "integer"}}}, "dependentRequired": {"a": ["b"]}}
    strict, loose = (Tool(name="odd", parameters=odd, strict=is_strict) for is_strict in (True, False))
    assert problem_of(of_tool_calls(PLAIN, [strict], AUTO))
    assert problem_of(of_tool_calls(PLAIN, [loose], REQUIRED)) == ""
    assert problem_of(of_tool_calls(PLAIN, [loose], AUTO)) == ""
