"""Form of an answer that a request asks for: its fields, and the grammar that holds the answer. Used by text routes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import msgspec

from mstar_core.api.parse.capabilities import check_capability
from mstar_core.api.parse.tools import ChatOptions, check_tool_name
from mstar_core.api.preprocess.grammar_checks import TOO_SLOW, GrammarChecks
from mstar_core.api.schema import (
    ChoiceTexts,
    GrammarText,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexText,
    ResponseFormat,
)
from mstar_core.constraints.content import ChosenText, ContentForm, JsonText, WrittenText
from mstar_core.errors import RequestError, TooLarge
from mstar_core.plugin.chat.format import ChatFormat
from mstar_core.plugin.chat.turns import ToolChoice
from mstar_core.plugin.spec import ModelSpec

MOST_BYTES: Final = 128 << 10
"""Most bytes of a schema or a grammar. The compiler needs about a second for so many."""

MOST_REGEX_BYTES: Final = 16 << 10
MOST_CHOICES: Final = 1024
SPOKEN: Final = frozenset(("text", "audio"))
"""Outputs of an answer that is in a form. Its audio speaks the text; the text beside an image is thinking."""

SMALL_VOCABULARY: Final = 10_000
THINKING_CHARS: Final = 2
"""Characters of thinking for each token of the output limit. A token has about four, so thinking takes about half.

Of a small vocabulary a token has about one, and thinking a quarter of these characters.
"""

SCHEMA: Final = "response_format.json_schema.schema"
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}


class FormFields(Protocol):
    """Fields of a request that hold its text to a form."""

    response_format: ResponseFormat
    grammar: GrammarText
    regex: RegexText
    choice: ChoiceTexts


class TextFormFields(msgspec.Struct, kw_only=True):
    """These fields alone."""

    response_format: ResponseFormat = None
    grammar: GrammarText = None
    regex: RegexText = None
    choice: ChoiceTexts = None


@dataclass(frozen=True, slots=True)
class TextForm:
    """A form and the field that asks for it."""

    field: str
    content: ContentForm


def read_text_form(
    spec: ModelSpec, sent: FormFields, outputs: Sequence[str], tools: ChatOptions | None = None
) -> TextForm | None:
    """Return the form of the text that a request asks for, None for any text.

    Raises RequestError for one that contradicts itself or the tools, or that the model cannot hold, and TooLarge.
    """
    found = [each for each in (_format(sent), *_extensions(sent)) if each is not None]
    if not found:
        return None
    asked = found[0]
    name = asked.field.partition(".")[0]
    if len(found) > 1:
        other = found[1].field
        raise RequestError(f"{name} contradicts {other}", hint="send only one of them", field=other)
    check_capability(spec, "structured_outputs", name)
    if "text" not in outputs or not SPOKEN.issuperset(outputs):
        raise RequestError(
            f"{name} is not supported together with {', '.join(kind for kind in outputs if kind not in SPOKEN)}"
            if "text" in outputs
            else f"{name} needs text among the outputs",
            hint="ask for text, or for text and audio",
            field=name,
            code="unsupported_parameter",
        )
    if tools is not None and tools.tools:
        _check_tools(spec, name, tools.choice)
    return asked


def _check_tools(spec: ModelSpec, name: str, choice: ToolChoice) -> None:
    """Refuse a form beside tools, unless the answer may be either of such a text and of calls."""
    if choice.mode == "none":
        return
    if choice.mode in ("required", "named"):
        hint = f'send tool_choice: "auto", or omit {name}'
        raise RequestError(f"{name} contradicts tool_choice: the answer has no text", hint=hint, field=name)
    reason = ""
    if name != "response_format":
        reason = "only response_format is"
    elif spec.chat.tools is not None and not spec.chat.tools.begin:
        reason = "calls of this model begin as JSON does"
    if reason:
        raise RequestError(
            f"{name} is not supported together with tools",
            reason,
            'send tool_choice: "none", or omit one of them',
            field=name,
            code="unsupported_parameter",
        )


def _format(sent: FormFields) -> TextForm | None:
    match sent.response_format:
        case JsonObjectFormat():
            return TextForm("response_format", JsonText(schema=ANY_OBJECT))
        case JsonSchemaFormat(json_schema=named):
            check_tool_name(named.name, "response_format.json_schema.name")
            _check_bytes(SCHEMA, json.dumps(named.schema), MOST_BYTES)
            return TextForm(SCHEMA, JsonText(schema=named.schema, is_strict=bool(named.strict)))
        case _:
            return None


def _extensions(sent: FormFields) -> list[TextForm]:
    found = []
    if sent.grammar is not None:
        _check_written("grammar", sent.grammar, MOST_BYTES)
        found.append(TextForm("grammar", WrittenText(form="grammar", text=sent.grammar)))
    if sent.regex is not None:
        _check_written("regex", sent.regex, MOST_REGEX_BYTES)
        found.append(TextForm("regex", WrittenText(form="regex", text=sent.regex)))
    if sent.choice is not None:
        _check_choice(sent.choice)
        found.append(TextForm("choice", ChosenText(texts=tuple(dict.fromkeys(sent.choice)))))
    return found


def _check_written(field: str, text: str, most: int) -> None:
    if not text.strip():
        raise RequestError(f"{field} is empty", hint="omit it for any text", field=field)
    _check_bytes(field, text, most)


def _check_choice(texts: Sequence[str]) -> None:
    allowed = f"1 to {MOST_CHOICES} texts"
    if not 1 <= len(texts) <= MOST_CHOICES:
        raise RequestError(f"choice has {len(texts)} texts, but must have {allowed}", field="choice", allowed=allowed)
    for number, text in enumerate(texts):
        if not text:
            raise RequestError(f"choice[{number}] is empty", hint="send a text", field=f"choice[{number}]")
    _check_bytes("choice", "".join(texts), MOST_BYTES)


def _check_bytes(field: str, text: str, most: int) -> None:
    size = len(text.encode())
    if size > most:
        raise TooLarge(
            f"{field} has {size:,} bytes, but at most {most:,} are allowed", field=field, code="body_too_large"
        )


def output_limit(params: object) -> int | None:
    """Return the output limit among the parameters of a request, None if the model has none."""
    limit = getattr(params, "max_output_tokens", None)
    return limit if isinstance(limit, int) else None


async def constraint_of(
    spec: ModelSpec, options: ChatOptions, asked: TextForm | None, grammars: GrammarChecks, limit: int | None = None
) -> str | None:
    """Return the grammar of an answer, None if it may be any text. limit: its tokens, which bound its thinking.

    Raises RequestError, with the field, for what cannot be compiled.
    """
    if options.choice.mode in ("required", "named"):
        check_capability(spec, "structured_outputs", "tool_choice")
    form = spec.chat if options.thinks else replace(spec.chat, reasoning=None)
    most = None if limit is None else _most_thinking(spec, limit)
    return await _held(form, options, asked, grammars, most)


def _most_thinking(spec: ModelSpec, limit: int) -> int:
    """Return the characters of thinking of an answer of up to `limit` tokens."""
    sizes = [node.sampling.vocab or 0 for node in spec.nodes if node.sampling is not None and node.sampling.is_text]
    most = THINKING_CHARS * limit
    return most // 4 if 0 < max(sizes, default=0) <= SMALL_VOCABULARY else most


async def _held(
    form: ChatFormat,
    options: ChatOptions,
    asked: TextForm | None,
    grammars: GrammarChecks,
    most_thinking: int | None = None,
) -> str | None:
    choice, tools = options.choice, options.tools
    is_forced = choice.mode in ("required", "named")
    has_calls = is_forced or (bool(tools) and choice.mode == "auto")
    if asked is None and not is_forced and not (has_calls and any(tool.strict for tool in tools)):
        return None
    # Here, because most requests need no grammar, and a model without text has no need of the library.
    from mstar_core.constraints.answers import of_answer

    content = None if asked is None else asked.content
    if not has_calls:
        tools, choice = (), ToolChoice(mode="none")
    if asked is not None and (why := await grammars.problem(of_answer(ChatFormat(), content=content))):
        raise _form_refused(asked, why)
    begins_open = options.begins_open
    whole = of_answer(
        form, content=content, tools=tools, choice=choice, begins_open=begins_open, most_thinking=most_thinking
    )
    problem = await grammars.problem(whole)
    if not problem:
        return whole
    for number, tool in enumerate(tools):
        alone = of_answer(form, tools=[tool], choice=ToolChoice(mode="named", name=tool.name))
        if why := await grammars.problem(alone):
            raise _refused(f"tools[{number}].function.parameters", why, TOOLS_WAY)
    raise _refused("tools" if tools else "the answer", problem, "send fewer tools, or simpler schemas")


async def text_constraint(asked: TextForm | None, grammars: GrammarChecks) -> str | None:
    """Return the grammar of an answer that is a text alone, without thinking and calls. Raises RequestError."""
    return await _held(ChatFormat(), ChatOptions(), asked, grammars)


TOOLS_WAY: Final = "simplify the schema, or omit strict and tool_choice"


def _form_refused(asked: TextForm, why: str) -> RequestError:
    match asked.content:
        case JsonText(is_strict=True) if why != TOO_SLOW:
            way = "change the schema, or omit strict, and keywords that no grammar holds are left out"
        case JsonText():
            way = 'simplify the schema, or send {"type": "json_object"}'
        case WrittenText(form="regex"):
            way = "the syntax is that of Rust's regex crate, without look-around and backreferences"
        case WrittenText(text=text) if "::=" in text:
            way = "this looks like GBNF; write it as Lark: `start: ...`"
        case WrittenText():
            way = "the syntax is Lark as llguidance reads it"
        case _:
            way = "send fewer or shorter texts"
    return _refused(asked.field, why, way)


def _refused(field: str, why: str, way: str) -> RequestError:
    return RequestError(f"{field} cannot be held by a grammar: {why[:300]}", hint=way, field=field)
