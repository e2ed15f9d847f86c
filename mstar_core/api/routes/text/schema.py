"""Request and response types of completions, embeddings, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from mstar_core.api.schema import (
    ChatMessage,
    ChoiceTexts,
    CompletionLogprobs,
    GrammarText,
    ModelName,
    RegexText,
    RequestId,
    ResponseFormat,
    StreamOptions,
    Usage,
)
from mstar_core.graph.declare.sampling import MOST_LOGPROBS

IDS: Final = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
PROMPTS: Final = {
    "anyOf": [
        {"type": "string"},
        IDS,
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        {"type": "array", "minItems": 1, "items": IDS},
    ]
}
"""Schema of one or several prompts, each a text or token ids."""


class CompletionRequest(msgspec.Struct, kw_only=True):
    """Completion request. Other fields are parameters of the model."""

    prompt: Annotated[
        Any,
        Meta(
            description="a text, token ids, or a list of either; read as it is, without a chat template",
            extra_json_schema=PROMPTS,
        ),
    ]
    model: ModelName = None
    stream: Annotated[bool, Meta(description="respond with server-sent events")] = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, description="completions of each prompt; completion i uses seed + i")] = 1
    echo: Annotated[bool, Meta(description="begin each completion with its prompt")] = False
    logprobs: (
        Annotated[
            int, Meta(ge=0, le=MOST_LOGPROBS, description="log-probabilities of the tokens and of so many others")
        ]
        | None
    ) = None
    response_format: ResponseFormat = None
    grammar: GrammarText = None
    regex: RegexText = None
    choice: ChoiceTexts = None
    best_of: Annotated[int, Meta(ge=1, description="accepted if it equals `n`")] | None = None
    suffix: Annotated[str, Meta(description="not supported", extra_json_schema={"maxLength": 0})] | None = None
    request_id: RequestId = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A completion, or more text of one. index: those of the first prompt come first."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: CompletionLogprobs | None = None


class TextCompletion(msgspec.Struct, kw_only=True):
    """Completions, or an event of a stream. With include_usage, the last event has usage and no choices."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Embedding request. Other fields are parameters of the model."""

    input: Annotated[Any, Meta(description="a text, token ids, or a list of either", extra_json_schema=PROMPTS)]
    model: ModelName = None
    encoding_format: Annotated[
        Literal["float", "base64"], Meta(description="`base64`: of float32 values, little endian")
    ] = "float"
    dimensions: Annotated[int, Meta(ge=1, description="length of the vectors; they are cut and normalized")] | None = (
        None
    )
    request_id: RequestId = None


class EmbeddingEntry(msgspec.Struct, kw_only=True):
    """Vector of one input, of length 1."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, kw_only=True):
    """Vectors in the order of the inputs."""

    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Prompt or messages to tokenize."""

    prompt: Annotated[str, Meta(description="a text, read as it is, without a chat template")] | None = None
    messages: (
        Annotated[list[ChatMessage], Meta(min_length=1, description="formatted by the chat template of the model")]
        | None
    ) = None
    add_special_tokens: (
        Annotated[bool, Meta(description="add the tokens around a prompt, as completions do; a template has its own")]
        | None
    ) = None
    return_token_strs: Annotated[bool, Meta(description="also return the text of each token")] = False
    model: ModelName = None
    request_id: RequestId = None


class Tokens(msgspec.Struct, kw_only=True):
    """Token ids of a prompt. max_model_len: tokens that the model reads at most, output included."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids to turn into text."""

    tokens: Annotated[list[Any], Meta(description="token ids", extra_json_schema={"items": IDS["items"]})]
    model: ModelName = None
    request_id: RequestId = None


class PlainText(msgspec.Struct, kw_only=True):
    """Text of token ids, control tokens included."""

    prompt: str
