"""Call: one HTTP request before it is sent, and what makes one. No sockets; both clients send what is made here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from mstar_core.client.frame import FRAMES
from mstar_core.client.media import Media, Upload, all_uploads, plain, uploads_of

NUMBERS: Final = frozenset(("action", "scalar", "tensor", "video"))
"""Outputs that are asked for as frames: base64 adds a third to them, and time at both ends."""

NDJSON: Final = "application/x-ndjson"
JSON: Final = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What to send. fields and files make a multipart body; without either there is none.

    is_probe: asks how things are now, so it is never sent again.
    """

    method: str
    path: str
    fields: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, Upload], ...] = ()
    accept: str = JSON
    is_probe: bool = False

    @property
    def parts(self) -> list[tuple[str, tuple[None, str] | tuple[str, bytes, str]]]:
        """The body as parts of a form: name, then file name, content and type; a plain field has no file name."""
        parts: list[Any] = [(name, (None, value)) for name, value in self.fields]
        return [*parts, *((name, (file.name, file.data, file.content_type)) for name, file in self.files)]


def generate_call(
    *,
    text: str | None = None,
    images: Media | None = None,
    audio: Media | None = None,
    video: Media | None = None,
    output_modalities: Sequence[str] | str = ("text",),
    input_modalities: Sequence[str] | str | None = None,
    stream: bool = False,
    request_id: str | None = None,
    tensors: Any = None,
    uploads: Sequence[Upload] = (),
    model_kwargs: Mapping[str, Any],
    may_frame: bool = True,
) -> Call:
    """POST /generate. Raises OSError for a path that cannot be read, TypeError and ValueError for what cannot be sent.

    A parameter that is None is left out: absent and None are the same to every model. uploads: further files, ready.
    may_frame: whether the answer may come as frames, which have no sign of life between them.
    """
    fields = {
        "text": text,
        "output_modalities": _names(output_modalities),
        "input_modalities": _names(input_modalities),
        "streaming": "true" if stream else "false",
        "stream_events": "full" if stream else None,
        "request_id": request_id,
        "model_kwargs": _json({name: value for name, value in model_kwargs.items() if value is not None}),
    }
    files = (*all_uploads(images=images, audio=audio, video=video, tensors=tensors), *uploads)
    return Call(
        method="POST",
        path="/generate",
        fields=tuple((name, value) for name, value in fields.items() if value is not None),
        files=tuple(("files", file) for file in files),
        accept=_accepted(NDJSON if stream else JSON, output_modalities, may_frame),
    )


def transcribe_call(audio: Media, params: Mapping[str, Any]) -> Call:
    """POST /v1/audio/transcriptions. Raises ValueError unless there is exactly one sound."""
    files = uploads_of("audio", audio)
    if len(files) != 1:
        raise ValueError(f"one sound is transcribed at a time, not {len(files)}")
    given = {"response_format": "json", **{name: value for name, value in params.items() if value is not None}}
    fields = tuple((name, value if isinstance(value, str) else _json(value)) for name, value in given.items())
    return Call(method="POST", path="/v1/audio/transcriptions", fields=fields, files=(("file", files[0]),))


def cancel_call(request_id: str) -> Call:
    """POST /v1/requests/{id}/cancel."""
    return Call(method="POST", path=f"/v1/requests/{quote(request_id, safe='')}/cancel")


def get_call(path: str) -> Call:
    """GET of a path."""
    return Call(method="GET", path=path)


def probe_call(path: str) -> Call:
    """GET of a path that tells a state."""
    return Call(method="GET", path=path, is_probe=True)


def _accepted(usual: str, output_modalities: Sequence[str] | str, may_frame: bool) -> str:
    """The content types to ask for. A server without frames sends what it always does."""
    asked = {name.strip().lower() for name in (_names(output_modalities) or "").split(",")}
    return f"{FRAMES}, {usual};q=0.5" if may_frame and asked & NUMBERS else usual


def _names(value: Sequence[str] | str | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return ",".join(value)


def _json(value: Any) -> str:
    return json.dumps(value, default=plain, allow_nan=False)
