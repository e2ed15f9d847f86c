"""GET, POST and DELETE of /v1/audio/voices: the voices of a model, and recordings that it clones."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sanic.response import HTTPResponse

from mstar_core.api.exchange import Exchange
from mstar_core.api.parse.media import ByteAllowance, part_of_upload, part_of_url
from mstar_core.api.requests.response_store import owner_of
from mstar_core.api.requests.voice_store import StoredVoice
from mstar_core.api.routes.fields import read_multipart
from mstar_core.api.schema import DeletedVoice, SpeechRequest, VoiceList, VoiceObject, VoiceRequest
from mstar_core.errors import RequestError
from mstar_core.plugin.params import param_specs
from mstar_core.plugin.processor import MediaPart
from mstar_core.plugin.spec import ModelSpec

NAME_CHARS: Final = 64
TEXT_PARAM: Final = "ref_text"
"""Parameter of a model that clones voices: what the recording says."""


def preset_voices(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the model's own voices."""
    return next((param.choices for param in param_specs(spec.params) if "voice" in (param.name, param.openai)), ())


def clones(spec: ModelSpec) -> bool:
    """Whether the model speaks in the voice of a recording."""
    return "speech" in spec.routes and spec.input("audio") is not None and "chat" not in spec.routes


async def voices(exchange: Exchange) -> HTTPResponse:
    """List the model's own voices, then those that the key has uploaded."""
    spec = exchange.service.model
    found = [VoiceObject(id=name, kind="preset") for name in preset_voices(spec)] if not clones(spec) else []
    stored = await asyncio.to_thread(exchange.service.voices.voices, owner_of(exchange.key))
    found += [VoiceObject(id=voice.name, created_at=voice.created, text=voice.text or None) for voice in stored]
    return exchange.json(VoiceList(data=found))


async def upload(exchange: Exchange) -> HTTPResponse:
    """Store a voice."""
    spec = exchange.service.model
    if not clones(spec):
        raise RequestError("the model does not clone voices", hint="use one of GET /v1/audio/voices", field="file")
    body, rest, files = await read_multipart(exchange, VoiceRequest)
    name = body.name.strip()
    if not 0 < len(name) <= NAME_CHARS or "/" in name or not name.isprintable():
        raise RequestError("name is not usable", hint=f"1 to {NAME_CHARS} characters without a slash", field="name")
    if rest or [file.field for file in files] != ["file"]:
        wrong = next(iter(rest), "file")[:40]
        raise RequestError(f"{wrong} is missing, repeated or unknown", hint="upload one sound as `file`", field=wrong)
    part = part_of_upload("file", files[0], "audio")
    voice = StoredVoice(name=name, recording=part.data, text=body.text.strip(), created=int(exchange.created))
    await asyncio.to_thread(exchange.service.voices.put, owner_of(exchange.key), voice)
    return exchange.json(VoiceObject(id=name, created_at=voice.created, text=voice.text or None))


async def delete(exchange: Exchange) -> HTTPResponse:
    """Delete an uploaded voice."""
    name = exchange.path_name
    await asyncio.to_thread(exchange.service.voices.delete, owner_of(exchange.key), name)
    return exchange.json(DeletedVoice(id=name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloned:
    """Recording of a speech request, and parameters that come with it.

    is_voice: the field `voice` names an uploaded voice.
    """

    media: tuple[MediaPart, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    is_voice: bool = False


async def recording_of(exchange: Exchange, body: SpeechRequest) -> Cloned:
    """Return the recording of a speech request: `ref_audio`, or that of an uploaded voice with its text.

    Raises RequestError, UnsupportedType, BadMedia.
    """
    spec, service = exchange.service.model, exchange.service
    if body.ref_audio is not None:
        allowance = ByteAllowance(exchange.limits.max_body_bytes)
        return Cloned(media=(await part_of_url("ref_audio", body.ref_audio, "audio", service.fetcher, allowance),))
    name = body.voice.get("id") if isinstance(body.voice, dict) else body.voice
    if not clones(spec) or not isinstance(name, str):
        return Cloned()
    voice = await asyncio.to_thread(service.voices.get, owner_of(exchange.key), name)
    if voice is None:
        return Cloned()
    params = {TEXT_PARAM: voice.text} if voice.text else {}
    return Cloned(media=(MediaPart(modality="audio", data=voice.recording),), params=params, is_voice=True)
