"""HTTP calls of the API before they are sent: method, path, fields and files. No sockets; used by every client."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from mstar_core.client.media import Media, MediaFile, all_files, files_of, json_value
from mstar_core.client.reader import FRAMES

NUMBERS: Final = frozenset(("action", "scalar", "tensor", "embedding", "video"))
"""Outputs requested as frames. Base64 would add a third to their size, and work at both ends."""

NDJSON: Final = "application/x-ndjson"
DETACH: Final = "X-Mstar-Detach"
"""Header of a request that goes on when its connection is closed."""

JSON: Final = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """One HTTP request to send. fields and files make a multipart body, and `body` is sent as JSON; without any of them
    the body is empty.

    headers: beside those of every call. is_probe: asks for a current state, so it is never retried.
    """

    method: str
    path: str
    fields: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, MediaFile], ...] = ()
    accept: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    is_probe: bool = False
    body: Any = None

    @property
    def parts(self) -> list[tuple[str, tuple[None, str] | tuple[str, bytes, str]]]:
        """The parts of the multipart form: name, then file name, content and type. A plain field has no file name."""
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
    files: Sequence[MediaFile] = (),
    model_kwargs: Mapping[str, Any],
    may_frame: bool = True,
    reconnect: bool = False,
) -> HttpCall:
    """Return POST /generate. Raises OSError for an unreadable path, TypeError and ValueError for invalid arguments.

    A parameter that is None is omitted: models treat absent and None alike. files: further files, already read.
    may_frame: whether the response may be frames, which carry no heartbeats. reconnect: the request goes on when its
    connection is closed.
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
    sent = (*all_files(images=images, audio=audio, video=video, tensors=tensors), *files)
    return HttpCall(
        method="POST",
        path="/generate",
        fields=tuple((name, value) for name, value in fields.items() if value is not None),
        files=tuple(("files", file) for file in sent),
        accept=_accepted(NDJSON if stream else JSON, output_modalities, may_frame),
        headers=((DETACH, "true"),) if reconnect else (),
    )


def transcribe_call(audio: Media, params: Mapping[str, Any]) -> HttpCall:
    """Return POST /v1/audio/transcriptions. Raises ValueError unless there is exactly one sound."""
    files = files_of("audio", audio)
    if len(files) != 1:
        raise ValueError(f"transcribe takes one sound, not {len(files)}")
    options = {"response_format": "json", **{name: value for name, value in params.items() if value is not None}}
    fields = tuple((name, value if isinstance(value, str) else _json(value)) for name, value in options.items())
    return HttpCall(method="POST", path="/v1/audio/transcriptions", fields=fields, files=(("file", files[0]),))


def cancel_call(request_id: str) -> HttpCall:
    """Return POST /v1/requests/{id}/cancel."""
    return HttpCall(method="POST", path=f"/v1/requests/{quote(request_id, safe='')}/cancel")


def events_call(request_id: str, after: int) -> HttpCall:
    """Return GET /v1/requests/{id}/events: the events behind number `after`."""
    path = f"/v1/requests/{quote(request_id, safe='')}/events?after={after}"
    return HttpCall(method="GET", path=path, accept="*/*", is_probe=True)


def get_call(path: str, *, is_probe: bool = False) -> HttpCall:
    """Return GET of a path."""
    return HttpCall(method="GET", path=path, is_probe=is_probe)


def _accepted(usual: str, output_modalities: Sequence[str] | str, may_frame: bool) -> str:
    """Return the Accept header. A server without frames answers in the usual form."""
    outputs = {name.strip().lower() for name in (_names(output_modalities) or "").split(",")}
    return f"{FRAMES}, {usual};q=0.5" if may_frame and outputs & NUMBERS else usual


def _names(value: Sequence[str] | str | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return ",".join(value)


def _json(value: Any) -> str:
    return json.dumps(value, default=json_value, allow_nan=False)
