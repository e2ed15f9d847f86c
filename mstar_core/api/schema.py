"""Request and response types of the HTTP API. Used by the routes, /openapi.json and docs/http-api.md."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from mstar_core.plugin.chat.format import Effort

ModelName = Annotated[str, Meta(description="any name of the served model")] | None
FinishReason = Literal["stop", "length", "tool_calls"]
SessionId = (
    Annotated[
        str, Meta(description="the client's id of a conversation, whose next request then reads only what is new")
    ]
    | None
)
RequestId = Annotated[str, Meta(description="the client's own id, as in the header X-Request-ID")] | None


class PromptTokens(msgspec.Struct, kw_only=True):
    """Prompt tokens by kind. Cached media counts as cached."""

    cached_tokens: int = 0
    text_tokens: int = 0
    image_tokens: int = 0
    audio_tokens: int = 0
    video_tokens: int = 0


class CompletionTokens(msgspec.Struct, kw_only=True):
    """Completion tokens by kind."""

    text_tokens: int = 0
    audio_tokens: int = 0
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Token usage of a request. The stop token is counted but not returned."""

    prompt_tokens: Annotated[int, Meta(description="tokens that the language model reads, media included")]
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class NativeUsage(Usage, kw_only=True):
    """Usage on /generate. Times are in milliseconds since arrival."""

    images: int = 0
    audio_seconds: float = 0.0
    action_steps: int = 0
    frames: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


class ErrorObject(msgspec.Struct, kw_only=True):
    """Error of a request: what is wrong, where, and what is allowed."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, kw_only=True):
    """Error response of every route."""

    error: ErrorObject
    detail: Annotated[str, Meta(description="the message again, on /generate only")] | msgspec.UnsetType = msgspec.UNSET


class NamedFile(msgspec.Struct, kw_only=True):
    """File in a JSON body."""

    data: Annotated[str, Meta(description="base64")]
    name: Annotated[str, Meta(description="a label only")] = ""


class NamedSchema(msgspec.Struct, kw_only=True):
    """JSON schema of an answer. name, description: labels, which the model does not read."""

    name: Annotated[str, Meta(description="1 to 64 of the characters a-z, A-Z, 0-9, _ and -")]
    schema: Annotated[dict[str, Any], Meta(description="JSON schema, up to 128 KiB")]
    strict: (
        Annotated[bool, Meta(description="refuse keywords that no grammar holds; otherwise they are left out")] | None
    ) = None
    description: str | None = None


class PlainTextFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="json_object"):
    """A JSON object."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that obeys a schema."""

    json_schema: NamedSchema


ResponseFormat = (
    Annotated[
        PlainTextFormat | JsonObjectFormat | JsonSchemaFormat, Meta(description="form of the text, held by a grammar")
    ]
    | None
)
GrammarText = (
    Annotated[str, Meta(description="grammar of the text in the Lark form of llguidance, up to 128 KiB")] | None
)
RegexText = Annotated[str, Meta(description="regular expression that the whole text obeys")] | None
ChoiceTexts = Annotated[list[str], Meta(description="texts of which the answer is one")] | None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Generate request: a form or a JSON object. Other fields are parameters of the model, as in model_kwargs."""

    text: Annotated[str, Meta(description="the prompt")] | None = None
    files: (
        Annotated[list[NamedFile], Meta(description="uploads, in order; their modality is detected from the content")]
        | None
    ) = None
    input_modalities: Annotated[str | list[str], Meta(description="order of the input segments")] | None = None
    output_modalities: (
        Annotated[str | list[str], Meta(description="default: text, or the first modality of the model")] | None
    ) = None
    streaming: Annotated[bool, Meta(description="stream the response while it is generated")] = True
    stream: Annotated[bool, Meta(description="the same as streaming")] | None = None
    model_kwargs: Annotated[dict[str, Any], Meta(description="parameters of the model")] | None = None
    request_id: RequestId = None
    session_id: SessionId = None
    stream_events: Annotated[
        Literal["data", "full"],
        Meta(description="`full` adds a start line, a done line, and `progress` and `partial_image` lines, if any"),
    ] = "data"
    response_format: ResponseFormat = None
    grammar: GrammarText = None
    regex: RegexText = None
    choice: ChoiceTexts = None
    model: ModelName = None


class OutputEntry(msgspec.Struct, kw_only=True):
    """Output. data: base64."""

    data: str
    metadata: dict[str, Any]


class Generated(msgspec.Struct, kw_only=True):
    """Response of /generate without streaming. outputs: by modality."""

    request_id: str
    outputs: dict[str, list[OutputEntry]]
    finish_reason: Literal["stop", "length"]
    usage: NativeUsage
    seed: int
    warnings: list[str]


class RobotCard(msgspec.Struct, kw_only=True):
    """Sizes of a robot's requests. state: number of joint values, null if it may vary. cameras: in upload order.

    horizon, action: shape of the actions, null if unknown.
    """

    state: int | None
    cameras: list[str]
    horizon: int | None
    action: int | None


class UnresumableCard(msgspec.Struct, kw_only=True):
    """Requests that are not resumed. params: values by which they are known; empty for all requests."""

    reason: str
    params: dict[str, Any] = {}


class ModelCard(msgspec.Struct, kw_only=True):
    """The served model. parameters: JSON schema. speech: whether the speech route answers or reads aloud.

    capabilities: what its text offers beyond plain answers.

    robot: sizes of a robot's requests.
    example, example_params: a text and parameters that a miniature was trained for. world: name of the simulated world
    that it was trained in. max_frames: most frames of a clip, for a model that uses every frame. dimensions: length of
    an embedding. unresumable: requests that end with an error if their worker dies; empty if all are resumed.
    """

    id: str
    created: int
    root: str
    aliases: list[str]
    input_modalities: list[str]
    output_modalities: list[str]
    endpoints: list[str]
    capabilities: list[str]
    max_model_len: int
    parameters: dict[str, Any]
    object: Literal["model"] = "model"
    owned_by: str = "mstar"
    speech: Literal["answer", "verbatim"] | UnsetType = UNSET
    robot: RobotCard | UnsetType = UNSET
    notice: str | UnsetType = UNSET
    example: str | UnsetType = UNSET
    example_params: dict[str, Any] | UnsetType = UNSET
    world: str | UnsetType = UNSET
    max_frames: int | UnsetType = UNSET
    dimensions: int | UnsetType = UNSET
    unresumable: list[UnresumableCard] = []


class ModelList(msgspec.Struct, kw_only=True):
    """List of one model: a deployment serves one model."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class SampleFile(msgspec.Struct, kw_only=True):
    """File of a sample. kind: its modality. data: base64."""

    name: str
    kind: Literal["image", "audio", "video", "tensor"]
    data: str


class SampleEntry(msgspec.Struct, kw_only=True):
    """Inputs of one request to /generate: text, files in order, parameters and the outputs to request."""

    name: str
    title: str
    text: str | None
    output_modalities: list[str]
    params: dict[str, Any]
    files: list[SampleFile]


class Samples(msgspec.Struct, kw_only=True):
    """Sample inputs of the served model; the one to try first is the first."""

    data: list[SampleEntry]
    object: Literal["list"] = "list"


class AttemptState(msgspec.Struct, kw_only=True):
    """One attempt of a request that a death has interrupted.

    cause: of the death that ended it, null for the last attempt. pause_s: seconds from the end of the attempt before it
    to its first output, null before that and for the first attempt.
    """

    attempt: int
    cause: str | None = None
    pause_s: float | None = None


class DeletedSession(msgspec.Struct, kw_only=True):
    """Confirmation that a session has ended."""

    id: str
    deleted: bool = True
    object: Literal["session"] = "session"


class RequestState(msgspec.Struct, kw_only=True):
    """State of a live request or outcome of a finished one."""

    id: str
    status: Literal["preprocessing", "queued", "running", "resuming", "finished", "failed", "cancelled"]
    route: str
    created: float
    error: ErrorObject | None = None
    attempts: list[AttemptState] | UnsetType = UNSET
    object: Literal["request"] = "request"
    total_ms: float | UnsetType = UNSET
    finish_reason: str | UnsetType = UNSET
    usage: dict[str, Any] | UnsetType = UNSET
    seed: int | UnsetType = UNSET


class CancelState(msgspec.Struct, kw_only=True):
    """Result of a cancellation."""

    id: str
    status: Literal["cancelled", "finished"]


class Health(msgspec.Struct, kw_only=True):
    """Health of the deployment: whether every process is alive."""

    status: Literal["healthy", "starting", "draining", "unhealthy"]
    phase: str | UnsetType = UNSET
    component: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class Ready(msgspec.Struct, kw_only=True):
    """Readiness of the deployment: whether a request would be accepted now."""

    status: Literal["ready", "unavailable"]
    model: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    phase: str | UnsetType = UNSET
    progress: str | UnsetType = UNSET
    captures: dict[str, dict[str, int]] | UnsetType = UNSET


class PluginVersion(msgspec.Struct, kw_only=True):
    """Plugin that provides the model."""

    name: str
    distribution: str
    version: str


class Version(msgspec.Struct, kw_only=True):
    """Versions of the server and the model. started_at: seconds since the epoch."""

    version: str
    api: int
    model: str
    plugin: PluginVersion
    started_at: int


class MediaUrl(msgspec.Struct, kw_only=True):
    """Location of media: a `data:` URL, or an http(s) URL of a host that the server allows."""

    url: str


class TextPart(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text part of a message."""

    text: str


class ImagePart(msgspec.Struct, kw_only=True, tag_field="type", tag="image_url"):
    """Image part of a message."""

    image_url: MediaUrl | str


class VideoPart(msgspec.Struct, kw_only=True, tag_field="type", tag="video_url"):
    """Video part of a message."""

    video_url: MediaUrl | str


class AudioUrlPart(msgspec.Struct, kw_only=True, tag_field="type", tag="audio_url"):
    """Audio part of a message; of a video the audio track is used."""

    audio_url: MediaUrl | str


class InputAudio(msgspec.Struct, kw_only=True):
    """Audio sent within the message."""

    data: Annotated[str, Meta(description="base64 of a file")]
    format: Annotated[str, Meta(description="a label only; the format is detected from the content")] = "wav"


class InputAudioPart(msgspec.Struct, kw_only=True, tag_field="type", tag="input_audio"):
    """Audio part sent within the message."""

    input_audio: InputAudio


ContentPart = TextPart | ImagePart | VideoPart | AudioUrlPart | InputAudioPart


class CalledFunction(msgspec.Struct, kw_only=True):
    """Function of a call. arguments: JSON text of an object."""

    name: str
    arguments: str = ""


class ChatToolCall(msgspec.Struct, kw_only=True):
    """Call of a function that an answer made."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    """Message of a chat. The order of the parts is kept.

    tool_calls, reasoning_content: calls and thinking of an earlier answer. tool_call_id: of the call that a message of
    the role `tool` answers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatFunction(msgspec.Struct, kw_only=True):
    """Function that the answer may call."""

    name: Annotated[str, Meta(description="1 to 64 of the characters a-z, A-Z, 0-9, _ and -")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], Meta(description="JSON schema of an object")] | None = None
    strict: Annotated[bool, Meta(description="the arguments obey the schema")] | None = None


class ChatTool(msgspec.Struct, kw_only=True):
    """Tool that the answer may call."""

    function: ChatFunction
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, kw_only=True):
    """Name of a function."""

    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """Choice of one tool."""

    function: NamedFunction
    type: Literal["function"] = "function"


class AudioOptions(msgspec.Struct, kw_only=True):
    """Options of audio output."""

    voice: Annotated[Any, Meta(description="a name in any case, or {id: name}")] = None
    format: Annotated[str, Meta(description="wav, mp3, flac, opus or pcm16; streams support only pcm16")] | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream."""

    include_usage: bool = False


HAS_CONTENT: Final = {
    "required": ["content"],
    "properties": {"content": {"type": ["string", "array"], "minLength": 1, "minItems": 1}},
}
"""Schema of a message that has content. A conversation needs one."""


class ChatRequest(msgspec.Struct, kw_only=True):
    """Chat request. Other fields are parameters of the model."""

    messages: Annotated[
        list[ChatMessage],
        Meta(
            min_length=1,
            description="in order; formatted by the chat template of the model",
            extra_json_schema={"contains": HAS_CONTENT},
        ),
    ]
    model: ModelName = None
    stream: Annotated[bool, Meta(description="respond with server-sent events")] = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, description="number of answers; answer i uses seed + i")] = 1
    modalities: Annotated[list[str], Meta(description="output modalities; default: text")] | None = None
    audio: Annotated[AudioOptions, Meta(description="options of audio output")] | None = None
    tools: Annotated[list[ChatTool], Meta(description="functions that the answer may call")] | None = None
    tool_choice: (
        Annotated[
            Literal["none", "auto", "required"] | NamedToolChoice,
            Meta(description="default: auto; `required` and a named tool are held by a grammar"),
        ]
        | None
    ) = None
    parallel_tool_calls: Annotated[bool, Meta(description="the answer may make several calls")] = True
    reasoning_effort: Annotated[Effort, Meta(description="amount of thinking; default: that of the model")] | None = (
        None
    )
    response_format: ResponseFormat = None
    grammar: GrammarText = None
    regex: RegexText = None
    choice: ChoiceTexts = None
    logprobs: Annotated[bool, Meta(description="return the log-probability of each token")] = False
    top_logprobs: Annotated[int, Meta(description="most likely tokens to return with each token, 0 to 20")] | None = (
        None
    )
    request_id: RequestId = None
    session_id: SessionId = None


class AnswerAudio(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Audio of an answer. It is not stored: expires_at is the time of its creation."""

    id: str
    data: Annotated[str, Meta(description="base64: a whole file, or PCM16 in a stream")] | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    transcript: str | UnsetType = UNSET


class AnswerPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Part of an answer with images."""

    type: Literal["text", "image_url"]
    text: str | UnsetType = UNSET
    image_url: MediaUrl | UnsetType = UNSET


class AnswerMessage(msgspec.Struct, kw_only=True):
    """Answer. content is a list of parts if it contains images, and null if it is empty beside calls."""

    role: Literal["assistant"] = "assistant"
    content: str | list[AnswerPart] | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    audio: AnswerAudio | UnsetType = UNSET
    refusal: None = None


class TokenAlternative(msgspec.Struct, kw_only=True):
    """A token and its log-probability, of the model itself. bytes: of the token, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenAlternative, kw_only=True):
    """A token of an answer, and the most likely tokens at its place."""

    top_logprobs: list[TokenAlternative]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Tokens of a text and their log-probabilities. text_offset: characters of the completion before each."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of the tokens of an answer in order, those of thinking and calls included."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class Choice(msgspec.Struct, kw_only=True):
    """One of the n answers."""

    index: int
    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Chat completion. system_fingerprint is `seed-` followed by the seed of the first answer."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str
    object: Literal["chat.completion"] = "chat.completion"


class FunctionDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Name of a called function, and text of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New text of a call. Only its first delta has id, type and name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New content. An image is sent as one data URL in `content`, in a delta of its own."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    audio: AnswerAudio | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """Delta of one of the n answers."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """Event of a stream. With include_usage, the last event has usage and no choices."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class SpeechRequest(msgspec.Struct, kw_only=True):
    """Speech request. Other fields are parameters of the model."""

    input: Annotated[
        str,
        Meta(
            description="the text to speak or to answer; see `speech` in /v1/models",
            extra_json_schema={"minLength": 1, "pattern": r"\S"},
        ),
    ]
    voice: Annotated[Any, Meta(description="a name in any case, or {id: name}; default: the model's own")] = None
    model: ModelName = None
    response_format: Annotated[
        Any, Meta(description="`wav`, `pcm` (PCM16 little endian), `flac`, `mp3` or `opus` (Ogg)")
    ] = "wav"
    stream: Annotated[bool, Meta(description="send the body while it is generated")] = False
    stream_format: Annotated[Literal["audio", "sse"], Meta(description="`sse` sends events and implies stream")] = (
        "audio"
    )
    instructions: Annotated[str, Meta(description="manner of speaking; a model without it gives a warning")] | None = (
        None
    )
    ref_audio: (
        Annotated[str, Meta(description="recording of a voice to clone, as a data: URL or a URL of an allowed host")]
        | None
    ) = None
    verbatim: (
        Annotated[bool, Meta(description="true: a model that answers reads the text aloud, word for word")] | None
    ) = None
    request_id: RequestId = None


class VoiceRequest(msgspec.Struct, kw_only=True):
    """Form of an uploaded voice, beside the recording in `file`."""

    name: Annotated[str, Meta(description="name of the voice, up to 64 characters", min_length=1)]
    text: Annotated[str, Meta(description="what the recording says; without it only the timbre is taken")] = ""


class VoiceObject(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A voice. kind: `preset` for the model's own."""

    id: str
    object: Literal["voice"] = msgspec.field(default_factory=lambda: "voice")
    kind: Literal["preset", "uploaded"] = msgspec.field(default_factory=lambda: "uploaded")
    created_at: int | None = None
    text: str | None = None


class VoiceList(msgspec.Struct, kw_only=True):
    """All voices of a key."""

    data: list[VoiceObject]
    object: Literal["list"] = "list"


class DeletedVoice(msgspec.Struct, kw_only=True):
    """Confirmation of a deletion."""

    id: str
    object: Literal["voice.deleted"] = "voice.deleted"
    deleted: bool = True


class SpeechText(msgspec.Struct, kw_only=True):
    """Later line of a speech request in JSON lines."""

    input: Annotated[str, Meta(description="more of the text")]


class SpeechUsage(msgspec.Struct, kw_only=True):
    """Input and output tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechDelta(msgspec.Struct, kw_only=True):
    """Event with a piece of audio in the requested format."""

    audio: Annotated[str, Meta(description="base64")]
    type: Literal["speech.audio.delta"] = "speech.audio.delta"


class SpeechDone(msgspec.Struct, kw_only=True):
    """Last event of a speech stream."""

    usage: SpeechUsage
    warnings: list[str]
    type: Literal["speech.audio.done"] = "speech.audio.done"


Granularity = Literal["word", "segment"]


class TranslationRequest(msgspec.Struct, kw_only=True):
    """Request for a translation into English: a form with the audio as `file`. Other fields are model parameters."""

    model: ModelName = None
    prompt: Annotated[str, Meta(description="English text that helps the model, such as names and terms")] | None = None
    response_format: Annotated[
        Literal["json", "text", "verbose_json", "srt", "vtt"],
        Meta(description="`verbose_json`, `srt` and `vtt` need a model that gives timestamps"),
    ] = "json"
    request_id: RequestId = None


class TranscriptionRequest(msgspec.Struct, kw_only=True):
    """Transcription request: a form with the audio as `file`. Other fields are parameters of the model."""

    model: ModelName = None
    language: Annotated[str, Meta(max_length=64, description="language of the speech, as a code or a name")] | None = (
        None
    )
    prompt: Annotated[str, Meta(description="text that helps the model, such as names and terms")] | None = None
    response_format: Annotated[
        Literal["json", "text", "verbose_json", "srt", "vtt"],
        Meta(description="`verbose_json`, `srt` and `vtt` need a model that gives timestamps"),
    ] = "json"
    granularities: Annotated[
        list[Granularity], Meta(description="times in `verbose_json`: of segments, the default, or of words")
    ] = msgspec.field(name="timestamp_granularities[]", default_factory=list)
    stream: Annotated[bool, Meta(description="respond with server-sent events")] = False
    request_id: RequestId = None


class Transcription(msgspec.Struct, kw_only=True):
    """Transcript."""

    text: str
    usage: Usage


class TimedSegment(msgspec.Struct, kw_only=True):
    """Part of a transcript. Times are in seconds."""

    id: int
    start: float
    end: float
    text: str
    seek: int = 0
    tokens: list[int] = []
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 1.0
    no_speech_prob: float = 0.0


class TimedWord(msgspec.Struct, kw_only=True):
    """Word of a transcript. Times are in seconds."""

    word: str
    start: float
    end: float


class VerboseTranscription(msgspec.Struct, kw_only=True):
    """Transcript with times."""

    task: str
    language: str
    duration: float
    text: str
    segments: list[TimedSegment] | UnsetType = UNSET
    words: list[TimedWord] | UnsetType = UNSET
    usage: Usage


class TranscriptDelta(msgspec.Struct, kw_only=True):
    """Event with more text."""

    delta: str
    type: Literal["transcript.text.delta"] = "transcript.text.delta"


class TranscriptDone(msgspec.Struct, kw_only=True):
    """Last event of a transcription stream, with the whole text."""

    text: str
    usage: Usage
    type: Literal["transcript.text.done"] = "transcript.text.done"
    warnings: list[str] | UnsetType = UNSET


class ImageRequest(msgspec.Struct, kw_only=True):
    """Image request. Other fields are parameters of the model."""

    prompt: Annotated[str, Meta(min_length=1, description="description of the image or of the edit")]
    model: ModelName = None
    n: Annotated[int, Meta(ge=1, description="number of images; image i uses seed + i")] = 1
    size: (
        Annotated[
            str,
            Meta(
                pattern="^([1-9][0-9]{0,4}x[1-9][0-9]{0,4}|auto)$",
                description="WIDTHxHEIGHT or auto; the parameters width and height win",
            ),
        ]
        | None
    ) = None
    response_format: Annotated[Literal["b64_json", "url"], Meta(description="`url` returns data URLs")] = "b64_json"
    output_format: Annotated[Literal["png", "jpeg", "webp"], Meta(description="file format of the images")] = "png"
    stream: Annotated[bool, Meta(description="answer by server-sent events, the image in the last one")] = False
    partial_images: Annotated[
        int, Meta(ge=0, le=3, description="images in the making to send before the last one; only in streams")
    ] = 0
    request_id: RequestId = None


class ImageTokens(msgspec.Struct, kw_only=True):
    """Tokens of a prompt or of an answer by kind."""

    image_tokens: int
    text_tokens: int


class ImageUsage(msgspec.Struct, kw_only=True):
    """Usage of images. output_tokens: those of a thought; the steps of an image are not tokens."""

    input_tokens: int
    input_tokens_details: ImageTokens
    output_tokens: int
    output_tokens_details: ImageTokens
    total_tokens: int


class ImagesUsage(Usage, kw_only=True):
    """Usage of all images of an answer, by the names of chat and by those of OpenAI's image routes."""

    input_tokens: int
    input_tokens_details: ImageTokens
    output_tokens: int
    output_tokens_details: ImageTokens


class ImageEvent(msgspec.Struct, kw_only=True):
    """Event of an image stream. index: number of the image; created_at: seconds since the epoch."""

    type: str
    b64_json: str
    created_at: int
    size: str
    output_format: str
    index: int
    background: str = "opaque"
    quality: str = "auto"
    partial_image_index: int | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    revised_prompt: str | UnsetType = UNSET
    usage: ImageUsage | UnsetType = UNSET


class MadeImage(msgspec.Struct, kw_only=True):
    """Generated image. revised_prompt: the reasoning text of the model, if any."""

    b64_json: str | None
    url: str | None
    seed: int
    revised_prompt: str | None


class Images(msgspec.Struct, kw_only=True):
    """Generated images."""

    created: int
    data: list[MadeImage]
    usage: ImagesUsage
    output_format: str


class ExpiresAfter(msgspec.Struct, kw_only=True):
    """Life of a client secret."""

    seconds: Annotated[int, Meta(ge=10, le=7200, description="from its creation")] = 600
    anchor: Literal["created_at"] = "created_at"


class ClientSecretRequest(msgspec.Struct, kw_only=True):
    """Request for a client secret."""

    expires_after: ExpiresAfter | None = None
    session: Annotated[
        dict[str, Any] | None, Meta(description="fields that its sessions begin with, as in `session.update`")
    ] = None
    request_id: RequestId = None


class IceServerAnswer(msgspec.Struct, kw_only=True):
    """STUN or TURN server, in the form of `RTCIceServer` of browsers. STUN servers have no user."""

    urls: list[str]
    username: str | UnsetType = UNSET
    credential: str | UnsetType = UNSET


class ClientSecretAnswer(msgspec.Struct, kw_only=True):
    """A client secret. expires_at: seconds since the epoch. ice_servers: for WebRTC calls, if any are configured."""

    value: str
    expires_at: int
    session: dict[str, Any]
    ice_servers: list[IceServerAnswer] | UnsetType = UNSET
