"""Fields of a session and of one response as clients send them, and the settings that they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from mstar_core.api.exchange import Exchange
from mstar_core.api.parse.tools import SentTool
from mstar_core.api.realtime.calls import checked_params, checked_tools, converses
from mstar_core.api.realtime.settings import OutputKind, RealtimeSettings, Truncation
from mstar_core.api.realtime.sound.voice_activity import EXTRA, can_detect_speech
from mstar_core.api.realtime.wire.audio_fields import (
    FormatFields,
    OutputSoundFields,
    ServerVadFields,
    SoundFields,
    VoiceFields,
    WireFields,
    format_of,
    transcripts_of,
    turns_of,
)
from mstar_core.api.realtime.wire.checked import checked, placed
from mstar_core.api.routes.fields import check_name, voice_of
from mstar_core.errors import RequestError
from mstar_core.plugin.chat.format import Effort
from mstar_core.plugin.chat.turns import ToolChoice
from mstar_core.plugin.params import param_specs
from mstar_core.plugin.spec import ModelSpec

UNLIMITED: Final = "inf"
Limit = Annotated[int, Meta(ge=1)] | Literal["inf"]


class ToolFields(WireFields):
    """A function that the model may call."""

    name: str
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChosenToolFields(WireFields):
    """The one function that the model must call."""

    name: str
    type: Literal["function"] = "function"


ChoiceFields = Literal["auto", "none", "required"] | ChosenToolFields


class TokenLimitFields(WireFields):
    """Limits of a truncation."""

    post_instructions: Annotated[int, Meta(ge=1)] | None = None


class RetentionFields(WireFields):
    """Truncation that keeps a share of the conversation."""

    retention_ratio: Annotated[float, Meta(ge=0, le=1)]
    type: Literal["retention_ratio"] = "retention_ratio"
    token_limits: TokenLimitFields | None = None


class EffortFields(WireFields):
    """Thinking of the model."""

    effort: Effort | None = None


class SessionFields(WireFields):
    """A session. Other fields are parameters of the model."""

    type: Literal["realtime"] = "realtime"
    model: str | None = None
    output_modalities: Annotated[list[OutputKind], Meta(min_length=1, max_length=2)] | None = None
    instructions: str = ""
    audio: SoundFields = msgspec.field(default_factory=SoundFields)
    tools: list[ToolFields] = msgspec.field(default_factory=list)
    tool_choice: ChoiceFields = "auto"
    max_output_tokens: Limit = UNLIMITED
    truncation: Literal["auto", "disabled"] | RetentionFields = "auto"
    include: list[str] | None = None
    reasoning: EffortFields | None = None
    tracing: Any = None
    prompt: Any = None
    parallel_tool_calls: bool | None = None


class ResponseSoundFields(WireFields):
    """Speech of one response."""

    format: FormatFields | None = None
    voice: str | VoiceFields | None = None


class ResponseAudioFields(WireFields):
    """Sound of one response."""

    output: ResponseSoundFields | None = None


class ResponseFields(WireFields):
    """Settings of one response in place of the session's. Other fields are parameters of the model."""

    conversation: Literal["auto", "none"] = "auto"
    input: list[dict[str, Any]] | None = None
    output_modalities: Annotated[list[OutputKind], Meta(min_length=1, max_length=2)] | None = None
    instructions: str | None = None
    audio: ResponseAudioFields | None = None
    tools: list[ToolFields] | None = None
    tool_choice: ChoiceFields | None = None
    max_output_tokens: Limit | None = None
    reasoning: EffortFields | None = None
    metadata: dict[str, str] | None = None
    prompt: Any = None
    parallel_tool_calls: bool | None = None


class SessionState:
    """Fields of a session as they are now, with the settings that they mean. Owned by the dialect of the session."""

    def __init__(self, exchange: Exchange) -> None:
        spec = exchange.service.model
        self.params: dict[str, Any] = {}
        self._exchange = exchange
        self._shown: dict[str, Any] = msgspec.to_builtins(default_fields(spec))
        self.settings = settings_of(exchange, self.fields, self.params)

    @property
    def fields(self) -> SessionFields:
        return msgspec.convert(self._shown, SessionFields)

    @property
    def shown(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {**self.params, **self._shown}

    def update(self, patch: Mapping[str, Any]) -> RealtimeSettings:
        """Change the fields that `patch` names, and return all settings. Raises RequestError; nothing changes then."""
        known, rest = _split(patch, SessionFields)
        checked(known, SessionFields, "session")
        shown = _merged(self._shown, known)
        params = {name: value for name, value in {**self.params, **rest}.items() if value is not None}
        fields = checked(shown, SessionFields, "session")
        settings = settings_of(self._exchange, fields, params)
        if settings.turns is None:
            fields.audio.input.turn_detection = None
        self._shown, self.params, self.settings = msgspec.to_builtins(fields), params, settings
        return settings

    def for_response(self, fields: ResponseFields, rest: Mapping[str, Any]) -> RealtimeSettings:
        """Return the settings of one response. Raises RequestError."""
        settings = self.settings
        spec = self._exchange.service.model
        changes: dict[str, Any] = {"params": {**settings.params, **rest}}
        if fields.instructions is not None:
            changes["instructions"] = fields.instructions
        if fields.output_modalities is not None:
            changes["output"] = _output(spec, fields.output_modalities, "response")
        if fields.tools is not None:
            changes["tools"] = _tools(fields.tools)
        if fields.tool_choice is not None:
            changes["choice"] = _choice(fields.tool_choice, fields.parallel_tool_calls)
        if fields.reasoning is not None:
            changes["effort"] = fields.reasoning.effort
        if fields.max_output_tokens is not None:
            changes["limit"] = _limit(fields.max_output_tokens)
        speech = fields.audio.output if fields.audio is not None else None
        if speech is not None and speech.format is not None:
            changes["spoken"] = format_of(speech.format)
        if speech is not None and speech.voice is not None:
            changes["voice"] = _voice(spec, speech.voice, "response")
        _refuse_prompt(fields.prompt, "response")
        settings = replace(settings, **changes)
        _check(self._exchange, settings, "response")
        return settings


def response_fields(sent: Mapping[str, Any]) -> tuple[ResponseFields, dict[str, Any]]:
    """Return the fields of a response, and its parameters of the model. Raises RequestError."""
    known, rest = _split(sent, ResponseFields)
    known = {name: value for name, value in known.items() if value is not None}
    return checked(known, ResponseFields, "response"), rest


def default_fields(spec: ModelSpec) -> SessionFields:
    """Return the fields of a new session: voice detection where the model hears and the server can detect speech."""
    fields = SessionFields(output_modalities=["audio" if spec.output("audio") is not None else "text"])
    if hears(spec) and can_detect_speech():
        fields.audio.input.turn_detection = ServerVadFields()
    fields.audio.output.voice = _default_voice(spec)
    return fields


def hears(spec: ModelSpec) -> bool:
    """Return whether sound of the user can become input of the model."""
    return converses(spec) and spec.input("audio") is not None


def settings_of(exchange: Exchange, fields: SessionFields, params: Mapping[str, Any]) -> RealtimeSettings:
    """Return the settings that the fields of a session mean. Raises RequestError for what the model cannot do."""
    spec = exchange.service.model
    check_name(exchange, fields.model)
    _check_input(spec, fields)
    _check_output(fields.audio.output)
    _refuse_prompt(fields.prompt, "session")
    if fields.include:
        raise _unsupported("session.include", "transcripts have no log-probabilities")
    settings = RealtimeSettings(
        output=_output(spec, fields.output_modalities or [], "session"),
        instructions=fields.instructions,
        voice=_voice(spec, fields.audio.output.voice, "session"),
        heard=format_of(fields.audio.input.format),
        spoken=format_of(fields.audio.output.format),
        turns=turns_of(fields.audio.input.turn_detection),
        transcripts=transcripts_of(fields.audio.input.transcription),
        tools=_tools(fields.tools),
        choice=_choice(fields.tool_choice, fields.parallel_tool_calls),
        effort=fields.reasoning.effort if fields.reasoning is not None else None,
        limit=_limit(fields.max_output_tokens),
        truncation=_truncation(fields.truncation),
        params=dict(params),
    )
    _check(exchange, settings, "session")
    return settings


def _check(exchange: Exchange, settings: RealtimeSettings, place: str) -> None:
    """Raise RequestError for tools and parameters that the model does not accept."""
    spec = exchange.service.model
    try:
        checked_params(exchange, settings)
        if converses(spec):
            checked_tools(spec, settings, exchange.limits.max_text_bytes)
        elif settings.tools:
            raise RequestError("the model does not call functions", hint="omit tools", field="tools")
    except RequestError as error:
        raise placed(error, place) from error


def _check_input(spec: ModelSpec, fields: SessionFields) -> None:
    sound = fields.audio.input
    if sound.turn_detection not in (None, False):
        place = "session.audio.input.turn_detection"
        if not hears(spec):
            raise _unsupported(place, "the model does not hear", "send null")
        if not can_detect_speech():
            raise _unsupported(place, "the server cannot detect speech", f"install {EXTRA}, or send null")
    if sound.transcription is not None and "transcription" not in spec.routes:
        raise _unsupported("session.audio.input.transcription", "the model does not transcribe", "send null")
    if sound.noise_reduction is not None:
        raise _unsupported("session.audio.input.noise_reduction", "sound is not filtered", "send null")


def _check_output(sound: OutputSoundFields) -> None:
    if sound.speed != 1:
        raise _unsupported("session.audio.output.speed", f"it is {sound.speed:g}, but must be 1", "send 1")


def _refuse_prompt(prompt: Any, place: str) -> None:
    if prompt is not None:
        raise _unsupported(f"{place}.prompt", "the server keeps no prompts", "send instructions")


def _unsupported(field: str, why: str, hint: str = "omit it") -> RequestError:
    return RequestError(f"{field} is not supported: {why}", hint=hint, field=field, code="unsupported_parameter")


def _output(spec: ModelSpec, kinds: Sequence[OutputKind], place: str) -> OutputKind:
    offered = [kind for kind in ("text", "audio") if spec.output(kind) is not None and _speaks_as(spec, kind)]
    field = f"{place}.output_modalities"
    for kind in kinds:
        if kind not in offered:
            raise RequestError(
                f"the model does not respond with {kind}",
                hint=f"supported: {', '.join(offered)}",
                field=field,
                code="unknown_modality",
            )
    return "audio" if "audio" in kinds else "text"


def _speaks_as(spec: ModelSpec, kind: str) -> bool:
    return kind == "audio" or converses(spec)


def _voice(spec: ModelSpec, voice: str | VoiceFields | None, place: str) -> str | None:
    sent = voice.id if isinstance(voice, VoiceFields) else voice
    return voice_of(spec, sent, f"{place}.audio.output.voice")


def _default_voice(spec: ModelSpec) -> str | None:
    known = next((param for param in param_specs(spec.params) if param.name == "voice"), None)
    return known.default if known is not None and isinstance(known.default, str) else None


def _tools(tools: Sequence[ToolFields]) -> list[SentTool]:
    return [
        SentTool(place=f"tools[{number}]", name=tool.name, description=tool.description, parameters=tool.parameters)
        for number, tool in enumerate(tools)
    ]


def _choice(choice: ChoiceFields, is_parallel: bool | None) -> ToolChoice:
    parallel = is_parallel is not False
    if isinstance(choice, ChosenToolFields):
        return ToolChoice(mode="named", name=choice.name, parallel=parallel)
    return ToolChoice(mode=choice, parallel=parallel)


def _limit(limit: int | str) -> int | None:
    return limit if isinstance(limit, int) else None


def _truncation(fields: str | RetentionFields) -> Truncation:
    if isinstance(fields, RetentionFields):
        limits = fields.token_limits
        most = None if limits is None else limits.post_instructions
        return Truncation(keeps=fields.retention_ratio, most=most)
    return Truncation(is_off=fields == "disabled")


def _split(sent: Mapping[str, Any], kind: type[WireFields]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the declared fields, and the others. Null at the top means absent."""
    names = set(kind.__struct_encode_fields__)
    known = {name: value for name, value in sent.items() if name in names and value is not None}
    return known, {name: value for name, value in sent.items() if name not in names}


def _merged(shown: Mapping[str, Any], patch: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields with those of a patch. `audio` and its two directions are merged, other values replaced."""
    merged = dict(shown)
    for name, value in patch.items():
        inner = (*path, name)
        is_merged = inner in (("audio",), ("audio", "input"), ("audio", "output"))
        merged[name] = _merged(shown[name], value, inner) if is_merged and isinstance(value, Mapping) else value
    return merged
