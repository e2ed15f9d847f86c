"""Types of /v1/responses: requests, items, responses and events. Used by its routes, /openapi.json and the docs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from mstar_core.api.schema import InputAudio, JsonObjectFormat, ModelName, PlainTextFormat, RequestId
from mstar_core.plugin.chat.format import Effort

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputText(msgspec.Struct, kw_only=True, tag_field="type", tag="input_text"):
    """Text of a message, or of the output of a call."""

    text: str


class InputImage(msgspec.Struct, kw_only=True, tag_field="type", tag="input_image"):
    """Image of a message. detail: accepted, without effect."""

    image_url: Annotated[str, Meta(description="a `data:` URL, or a URL of a host that the server allows")] | None = (
        None
    )
    file_id: Annotated[str, Meta(description="refused: the server stores no files")] | None = None
    detail: str | None = "auto"


class InputAudioItem(msgspec.Struct, kw_only=True, tag_field="type", tag="input_audio"):
    """Audio of a message."""

    input_audio: InputAudio


class InputFile(msgspec.Struct, kw_only=True, tag_field="type", tag="input_file"):
    """File of a message: refused."""


class TokenOption(msgspec.Struct, kw_only=True):
    """A likely token at a position."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TokenOption, kw_only=True):
    """A token of the output, with the most likely ones at its position."""

    top_logprobs: list[TokenOption] = []


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text of an answer. logprobs: of its tokens, if the request includes them."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputRefusal(msgspec.Struct, kw_only=True, tag_field="type", tag="refusal"):
    """Refusal in an earlier answer, of another server."""

    refusal: str


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of the thinking before an answer."""

    text: str


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    """Summary of the thinking, of another server."""

    text: str


InputContent = InputText | InputImage | InputAudioItem | InputFile
MessageContent = InputText | InputImage | InputAudioItem | InputFile | OutputText | OutputRefusal


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """Message of the client, or an answer."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[MessageContent]
    id: str | UnsetType = UNSET
    status: ItemStatus | UnsetType | None = UNSET


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """Call of a function by an answer. arguments: JSON text of an object."""

    call_id: str
    name: str
    arguments: str
    id: str | UnsetType | None = UNSET
    status: ItemStatus | UnsetType | None = UNSET


class FunctionCallOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    """Output of a function that an answer called."""

    call_id: str
    output: str | list[InputContent]
    id: str | UnsetType | None = UNSET
    status: ItemStatus | UnsetType | None = UNSET


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Thinking before an answer."""

    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    id: str | UnsetType = UNSET
    status: ItemStatus | UnsetType | None = UNSET


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
OutputItem = MessageItem | FunctionCallItem | ReasoningItem


class FunctionTool(msgspec.Struct, kw_only=True):
    """Function that the answer may call."""

    name: Annotated[str, Meta(description="1 to 64 of the characters a-z, A-Z, 0-9, _ and -")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], Meta(description="JSON schema of an object")] | None = None
    strict: Annotated[bool, Meta(description="the arguments obey the schema")] | None = None
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, kw_only=True):
    """Name of a function among the tools."""

    name: str
    type: Literal["function"] = "function"


class FunctionChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """Choice of one function."""

    name: str


class AllowedTools(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Choice of some of the tools. The others are left out."""

    tools: Annotated[list[FunctionName], Meta(min_length=1)]
    mode: Literal["auto", "required"] = "auto"


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """Options of thinking. No summaries are made: items of the type `reasoning` have the whole text."""

    effort: Annotated[Effort, Meta(description="amount of thinking; default: that of the model")] | None = None
    summary: Annotated[str, Meta(description="only `auto`")] | None = None
    generate_summary: Annotated[str, Meta(description="the same as summary")] | None = None


class SchemaOption(msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that obeys a schema. name, description: labels, which the model does not read."""

    name: Annotated[str, Meta(description="1 to 64 of the characters a-z, A-Z, 0-9, _ and -")]
    schema: Annotated[dict[str, Any], Meta(description="JSON schema, up to 128 KiB")]
    strict: (
        Annotated[bool, Meta(description="refuse keywords that no grammar holds; otherwise they are left out")] | None
    ) = None
    description: str | None = None


TextFormat = PlainTextFormat | JsonObjectFormat | SchemaOption


class TextOptions(msgspec.Struct, kw_only=True):
    """Options of the text of an answer."""

    format: Annotated[TextFormat, Meta(description="form of the text, held by a grammar")] | None = None
    verbosity: Annotated[str, Meta(description="only `medium`")] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Request for a response. Other fields are parameters of the model."""

    input: Annotated[str | list[Item], Meta(description="a text, or items in order")] | None = None
    model: ModelName = None
    instructions: (
        Annotated[str, Meta(description="a system message before the input; not carried over to later responses")]
        | None
    ) = None
    previous_response_id: Annotated[str, Meta(description="a stored response whose conversation goes on")] | None = None
    tools: Annotated[list[FunctionTool], Meta(description="functions that the answer may call")] | None = None
    tool_choice: (
        Annotated[
            Literal["auto", "none", "required"] | FunctionChoice | AllowedTools,
            Meta(description="default: auto; `required` and a named function are held by a grammar"),
        ]
        | None
    ) = None
    parallel_tool_calls: Annotated[bool, Meta(description="the answer may make several calls")] = True
    text: Annotated[TextOptions, Meta(description="options of the text")] | None = None
    reasoning: Annotated[ReasoningOptions, Meta(description="options of thinking")] | None = None
    include: (
        Annotated[list[str], Meta(description="`message.output_text.logprobs`, `message.input_image.image_url`")] | None
    ) = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20, description="most likely tokens at each position")] | None = None
    stream: Annotated[bool, Meta(description="respond with server-sent events")] = False
    background: Annotated[bool, Meta(description="go on without the client, which polls the response")] = False
    store: (
        Annotated[bool, Meta(description="keep the response; default: true, if the server keeps responses")] | None
    ) = None
    truncation: Annotated[str, Meta(description="only `disabled`")] | None = None
    metadata: Annotated[dict[str, str], Meta(description="up to 16 pairs, returned with the response")] | None = None
    request_id: RequestId = None


class InputTokenDetails(msgspec.Struct, kw_only=True):
    """Input tokens that were not computed again."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokenDetails(msgspec.Struct, kw_only=True):
    """Output tokens of thinking."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token usage of a response."""

    input_tokens: int
    input_tokens_details: InputTokenDetails
    output_tokens: int
    output_tokens_details: OutputTokenDetails
    total_tokens: int


class ResponseError(msgspec.Struct, kw_only=True):
    """Cause of a failed response."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Cause of an incomplete response."""

    reason: Literal["max_output_tokens"]


class ReasoningEcho(msgspec.Struct, kw_only=True):
    """Options of thinking that applied."""

    effort: str | None = None
    summary: str | None = None


class TextEcho(msgspec.Struct, kw_only=True):
    """Options of text that applied."""

    format: TextFormat
    verbosity: str = "medium"


class ResponseObject(msgspec.Struct, kw_only=True):
    """Response. store: whether it can be retrieved and continued. Times are in seconds since the epoch."""

    id: str
    created_at: int
    model: str
    status: Status = "in_progress"
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: ReasoningEcho = msgspec.field(default_factory=ReasoningEcho)
    service_tier: str = "default"
    store: bool = False
    temperature: float | None = None
    text: TextEcho = msgspec.field(default_factory=lambda: TextEcho(format=PlainTextFormat()))
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | AllowedTools = "auto"
    tools: list[FunctionTool] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    object: Literal["response"] = "response"


class DeletedResponse(msgspec.Struct, kw_only=True):
    """Confirmation of a deletion."""

    id: str
    deleted: bool = True
    object: Literal["response"] = "response"


class ItemList(msgspec.Struct, kw_only=True):
    """Page of the items that a response was generated from."""

    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class ResponseErrorEvent(msgspec.Struct, kw_only=True, tag_field="type", tag="error"):
    """Last event of a stream whose request was refused, so that there is no response object. message: of the error."""

    sequence_number: int
    code: str
    message: str
    param: str | None


class ResponseEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Event of a stream. Which fields it has follows from its type. sequence_number counts from 0."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
