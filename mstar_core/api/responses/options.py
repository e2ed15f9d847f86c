"""Options of a response: those that the server does not have, which are refused by name, and others as chats have them.

Used to create responses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mstar_core.api.parse.constraint import TextFormFields
from mstar_core.api.parse.tools import SentTool
from mstar_core.api.responses.schema import (
    AllowedTools,
    FunctionChoice,
    ResponsesRequest,
    SchemaOption,
)
from mstar_core.api.schema import JsonSchemaFormat, NamedSchema
from mstar_core.errors import RequestError, did_you_mean
from mstar_core.plugin.chat.turns import ToolChoice

LOGPROBS: Final = "message.output_text.logprobs"
INCLUDED: Final = (LOGPROBS, "message.input_image.image_url")
"""Values of `include`. URLs of images are always returned."""

HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "access_programs": (),
    "context_management": ([],),
    "conversation": (),
    "image": ({}, {"context_compression": "auto"}, {"context_compression": "disabled"}),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "stream_options": ({}, {"include_obfuscation": False}),
}
"""Options that the server does not have, and their values without effect, which are accepted."""

SILENT: Final = ("max_tool_calls", "prompt_cache_retention")
"""Options that are accepted: limits of hosted tools, which do not exist, and a hint."""

PLACES: Final = (
    (r"\btools\[(\d+)\]\.function\.", r"tools[\1]."),
    (r"\bresponse_format\.json_schema\b", "text.format"),
    (r"\bresponse_format\b", "text.format"),
    (r"(?<!_)\blogprobs\b", "include"),
    (r"\bmessages\b", "input"),
)
"""Fields of chats, and those of responses."""

METADATA_PAIRS: Final = 16
METADATA_KEY_CHARS: Final = 64
METADATA_CHARS: Final = 512


def check_raw(fields: Mapping[str, Any]) -> None:
    """Refuse tools and choices of tools other than functions. Raises RequestError (`unsupported_parameter`)."""
    tools = fields.get("tools")
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise _refused(f"tools[{number}].type", f"tools of the type {kind[:60]!r} are", "function")
    choice = fields.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        raise _refused("tool_choice.type", f"choices of the type {kind[:60]!r} are", "function, allowed_tools")


def check_options(body: ResponsesRequest, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are left for the model. Raises RequestError for options that the server does not have."""
    for name, harmless in HARMLESS.items():
        if name in rest and rest[name] not in harmless:
            raise _refused(name, f"{name} is")
    if body.truncation not in (None, "disabled"):
        raise _refused("truncation", f"truncation {body.truncation[:40]!r} is", "disabled")
    if body.reasoning is not None:
        for name, value in (("summary", body.reasoning.summary), ("generate_summary", body.reasoning.generate_summary)):
            if value not in (None, "auto"):
                raise _refused(f"reasoning.{name}", f"the summary {value[:40]!r} is", "auto, which makes none")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise _refused("text.verbosity", f"the verbosity {body.text.verbosity[:40]!r} is", "medium")
    check_include(body.include or ())
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise RequestError(
            "top_logprobs needs log-probabilities", hint=f"include {LOGPROBS}", field="top_logprobs", allowed="0"
        )
    _check_metadata(body.metadata or {})
    return {name: value for name, value in rest.items() if name not in HARMLESS and name not in SILENT}


def check_include(names: Sequence[str]) -> None:
    """Raise RequestError for a name that is not supported."""
    for name in names:
        if name not in INCLUDED:
            raise _refused("include", f"{name[:60]!r} is", ", ".join(INCLUDED))


def tools_of(body: ResponsesRequest) -> list[SentTool]:
    """Return the tools that the answer may call. Raises RequestError."""
    sent = [
        SentTool(
            place=f"tools[{number}]",
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        for number, tool in enumerate(body.tools or ())
    ]
    if not isinstance(body.tool_choice, AllowedTools):
        return sent
    allowed, names = [each.name for each in body.tool_choice.tools], [tool.name for tool in sent]
    for number, name in enumerate(allowed):
        if name not in names:
            place = f"tool_choice.tools[{number}].name"
            raise RequestError(f"{place}: there is no tool {name[:64]!r}", hint=did_you_mean(name, names), field=place)
    return [tool for tool in sent if tool.name in allowed]


def choice_of(body: ResponsesRequest) -> ToolChoice:
    """Return the choice of tools."""
    parallel = body.parallel_tool_calls
    match body.tool_choice:
        case FunctionChoice(name=name):
            return ToolChoice(mode="named", name=name, parallel=parallel)
        case AllowedTools(mode=mode):
            return ToolChoice(mode=mode, parallel=parallel)
        case other:
            return ToolChoice(mode=other or "auto", parallel=parallel)


def form_of(body: ResponsesRequest) -> TextFormFields:
    """Return the format of the text as fields of a chat."""
    form = body.text.format if body.text is not None else None
    if isinstance(form, SchemaOption):
        named = NamedSchema(name=form.name, schema=form.schema, strict=form.strict, description=form.description)
        return TextFormFields(response_format=JsonSchemaFormat(json_schema=named))
    return TextFormFields(response_format=form)


def chat_place(text: str) -> str:
    """Return a text with the paths of fields of chats replaced by those of responses."""
    for chat, response in PLACES:
        text = re.sub(chat, response, text)
    return text


def _check_metadata(metadata: Mapping[str, str]) -> None:
    allowed = f"{METADATA_PAIRS} pairs of {METADATA_KEY_CHARS} and {METADATA_CHARS} characters"
    if len(metadata) > METADATA_PAIRS or any(
        len(name) > METADATA_KEY_CHARS or len(value) > METADATA_CHARS for name, value in metadata.items()
    ):
        raise RequestError(f"metadata has more than {allowed}", field="metadata", allowed=allowed)


def _refused(field: str, what: str, allowed: str = "") -> RequestError:
    hint = f"allowed: {allowed}" if allowed else "omit it"
    facts = {"allowed": allowed} if allowed else {}
    return RequestError(f"{what} not supported", hint=hint, field=field, code="unsupported_parameter", **facts)
