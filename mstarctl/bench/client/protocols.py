"""Requests as HTTP bodies, for `/generate` and the OpenAI routes. Encoded before the run."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.errors import UsageError
from mstar_core.workloads import ServedModel, WorkloadRequest

GENERATE, OPENAI = "generate", "openai"
PROTOCOLS: Final = (GENERATE, OPENAI)
FRAMES: Final = "application/x-mstar-frames"
BOUNDARY: Final = "mstar-bench-part-7c1d9e"
OPENAI_VOICE: Final = "alloy"
BINARY_OUTPUTS: Final = frozenset({"tensor", "scalar", "video"})
"""Outputs that are received as binary frames, because their base64 costs more than the read."""

_KINDS: Final = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "audio/wav", b"fLaC": "audio/flac"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRequest:
    """One request as it is sent."""

    path: str
    content_type: str
    accept: str
    body: bytes


def encode(request: WorkloadRequest, protocol: str, card: ServedModel) -> WireRequest:
    """Encode a request. Raises UsageError if the protocol cannot express it."""
    return _openai(request, card) if protocol == OPENAI else _generate(request, card)


def _generate(request: WorkloadRequest, card: ServedModel) -> WireRequest:
    is_ours = bool(card.endpoints)
    fields: dict[str, Any] = {"output_modalities": ",".join(request.outputs), "streaming": True}
    if request.text is not None:
        fields["text"] = request.text
    if request.params:
        fields["model_kwargs"] = dict(request.params)
    if is_ours:
        fields["stream_events"] = "full"
    accept = FRAMES if is_ours and BINARY_OUTPUTS.intersection(request.outputs) else "application/x-ndjson"
    if request.files or not is_ours:
        body, kind = form(fields, request.files), f"multipart/form-data; boundary={BOUNDARY}"
    else:
        body, kind = json.dumps(fields).encode(), "application/json"
    return WireRequest(path="/generate", content_type=kind, accept=accept, body=body)


def form(fields: dict[str, Any], files: tuple[tuple[str, bytes], ...]) -> bytes:
    """Return a multipart form with the boundary `BOUNDARY`."""
    parts = []
    for name, value in fields.items():
        text = value if isinstance(value, str) else json.dumps(value)
        parts.append(f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n'.encode())
    for name, data in files:
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
        parts += [head.encode(), data, b"\r\n"]
    return b"".join([*parts, f"--{BOUNDARY}--\r\n".encode()])


def _openai(request: WorkloadRequest, card: ServedModel) -> WireRequest:
    params = dict(request.params)
    if request.outputs == ("audio",) and not request.files:
        voice = {"stream": True} if card.endpoints else {"voice": OPENAI_VOICE}
        fields = {"model": card.name, "input": request.text, **voice, "response_format": "pcm", **params}
        return _json("/v1/audio/speech", fields)
    if request.outputs == ("image",) and not request.files:
        fields = {"model": card.name, "prompt": request.text, "response_format": "b64_json", **params}
        return _json("/v1/images/generations", fields)
    if not set(request.outputs) <= {"text", "audio"}:
        raise UsageError(
            f"the OpenAI routes cannot express a request for {', '.join(request.outputs)}", hint="--protocol generate"
        )
    fields = {
        "model": card.name,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": _content(request)}],
        **params,
    }
    if "max_output_tokens" in fields and not card.endpoints:
        fields["max_tokens"] = fields.pop("max_output_tokens")
    if "audio" in request.outputs:
        fields |= {
            "modalities": list(request.outputs),
            "audio": {"voice": params.get("voice") or _voice(card), "format": "pcm16"},
        }
        fields.pop("voice", None)
    return _json("/v1/chat/completions", fields)


def _voice(card: ServedModel) -> str:
    """Return the model's own voice if its parameters publish one, else a voice that OpenAI has."""
    return str(card.parameters.get("voice", {}).get("default") or OPENAI_VOICE)


def _content(request: WorkloadRequest) -> str | list[dict[str, Any]]:
    if not request.files:
        return request.text or ""
    parts: list[dict[str, Any]] = []
    for name, data in request.files:
        kind = next((kind for start, kind in _KINDS.items() if data.startswith(start)), "")
        text = base64.b64encode(data).decode()
        if kind.startswith("image"):
            parts.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{text}"}})
        elif kind.startswith("audio"):
            parts.append({"type": "input_audio", "input_audio": {"data": text, "format": kind.rpartition("/")[2]}})
        else:
            raise UsageError(f"the OpenAI routes cannot carry {name}", hint="--protocol generate")
    return [*parts, {"type": "text", "text": request.text or ""}]


def _json(path: str, fields: dict[str, Any]) -> WireRequest:
    return WireRequest(path=path, content_type="application/json", accept="*/*", body=json.dumps(fields).encode())
