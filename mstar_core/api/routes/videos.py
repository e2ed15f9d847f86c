"""POST, GET and DELETE of /v1/videos: jobs that generate a video from a prompt, optionally with an image."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any, Final

import msgspec
from sanic.response import HTTPResponse

from mstar_core.api.exchange import Exchange
from mstar_core.api.http.body import UploadedFile, check_size
from mstar_core.api.http.ranges import asked_range
from mstar_core.api.parse.media import ByteAllowance, part_of_upload, part_of_url
from mstar_core.api.parse.params import ParsedRequest, check_images
from mstar_core.api.requests.response_store import owner_of
from mstar_core.api.routes.fields import answered_name, check_name, openai_parsed, read_body, read_multipart
from mstar_core.api.videos.jobs import THUMBNAIL, VIDEO, JobRequest
from mstar_core.api.videos.schema import DeletedVideo, VideoList, VideoObject, VideoRequest
from mstar_core.api.videos.store import StoredVideo
from mstar_core.errors import Duplicate, NotFound, RequestError
from mstar_core.plugin.processor import MediaPart

REFERENCE: Final = "input_reference"
FILES: Final = {"video": (VIDEO, "video/mp4"), "thumbnail": (THUMBNAIL, "image/webp")}
POLL_MS: Final = "1000"
"""Suggested interval of polls, in the header that OpenAI's client reads."""

MOST: Final = 100
USUAL: Final = 20
ID_BYTES: Final = 16


async def create(exchange: Exchange) -> HTTPResponse:
    """Begin to generate a video."""
    files: list[UploadedFile] = []
    if exchange.content_type.partition(";")[0].strip().lower() == "multipart/form-data":
        body, rest, files = await read_multipart(exchange, VideoRequest)
    else:
        body, rest = await read_body(exchange, VideoRequest)
    service, spec = exchange.service, exchange.service.model
    check_name(exchange, body.model)
    if not body.prompt.strip():
        raise RequestError("prompt is empty", hint="describe the video", field="prompt")
    check_size("prompt", len(body.prompt.encode()), exchange.limits)
    media = await _media(exchange, body, files)
    check_images(spec, len(media), REFERENCE)
    offered = {"seconds": _seconds(body.seconds), "size": body.size}
    values = {**{name: value for name, value in offered.items() if value is not None}, **rest}
    parsed = openai_parsed(exchange, values, ("video",), route="video")
    call = parsed.request(exchange.request_id, "video", outputs=("video",), text=body.prompt, media=media)
    size, seconds = await _checked(exchange, call)
    stem = f"{exchange.request_id}/{exchange.created}/{exchange.key}"
    video = VideoObject(
        id=f"video_{hashlib.blake2b(stem.encode(), digest_size=ID_BYTES).hexdigest()}",
        model=answered_name(exchange, body.model),
        created_at=int(exchange.created),
        prompt=body.prompt,
        seconds=seconds,
        size=size,
    )
    request = JobRequest(
        prompt=body.prompt,
        params={item.name: getattr(call.params, item.name) for item in dataclasses.fields(call.params)},
        seed=call.seed,
        timeout_s=max(call.timeout_s, exchange.limits.videos_timeout_s),
        route="video",
        images=[f"image_{number}" for number in range(len(media))],
        parent=exchange.request_id,
    )
    entry = StoredVideo(
        id=video.id,
        owner=owner_of(exchange.key),
        key=exchange.key,
        status=video.status,
        created=exchange.created,
        body=msgspec.json.encode(video),
        request=msgspec.json.encode(request),
    )
    exchange.warn(call.warnings)
    return _answer(exchange, await service.videos.create(entry, [part.data for part in media]))


async def retrieve(exchange: Exchange) -> HTTPResponse:
    """Return a video and its progress."""
    return _answer(exchange, await _found(exchange))


async def content(exchange: Exchange) -> HTTPResponse:
    """Return the file of a finished video, or its first frame, or a byte range of them."""
    variant = exchange.request.args.get("variant") or "video"
    if variant not in FILES:
        raise RequestError(f"variant {variant[:40]!r} is not offered", field="variant", allowed=", ".join(FILES))
    video = await _found(exchange)
    if video.status == "failed":
        why = video.error.message if video.error is not None else ""
        raise NotFound("the video failed", why, "create it again", code="video_failed")
    if video.status != "completed":
        raise Duplicate(
            f"the video is {video.status.replace('_', ' ')}", hint="poll it until completed", code="video_not_ready"
        )
    name, kind = FILES[variant]
    path = exchange.service.videos.store.files(video.id) / name
    headers = exchange.request.headers
    # Files have no validator that `If-Range` could name.
    wanted = None if "if-range" in headers else headers.get("range")
    try:
        data, start, size = await asyncio.to_thread(_part, path, wanted)
    except OSError as error:
        raise _unknown(video.id) from error
    if start is None:
        return exchange.whole(data, kind, headers={"Accept-Ranges": "bytes"})
    place = f"bytes {start}-{start + len(data) - 1}/{size}"
    return exchange.whole(data, kind, 206, {"Accept-Ranges": "bytes", "Content-Range": place})


def _part(path: Path, wanted: str | None) -> tuple[bytes, int | None, int]:
    """Return the bytes of a file that are asked for, where they begin, None for all of them, and the file's size.

    Raises OSError, RangeNotSatisfiable.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        found = asked_range(wanted, size)
        if found is None:
            return file.read(), None, size
        file.seek(found[0])
        return file.read(found[1] - found[0]), found[0], size


async def delete(exchange: Exchange) -> HTTPResponse:
    """Delete a video. One that is generated is cancelled."""
    if not await exchange.service.videos.delete(exchange.path_name, owner_of(exchange.key)):
        raise _unknown(exchange.path_name)
    return exchange.json(DeletedVideo(id=exchange.path_name))


async def page(exchange: Exchange) -> HTTPResponse:
    """Return a page of videos, the newest first."""
    args = exchange.request.get_args(keep_blank_values=True)
    order, limit, after = str(args.get("order", "desc")), str(args.get("limit", USUAL)), args.get("after")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc", field="order", allowed="asc, desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MOST):
        raise RequestError(f"limit must be 1 to {MOST}", field="limit", allowed=f"1 to {MOST}")
    videos = exchange.service.videos
    owner, count = owner_of(exchange.key), int(limit)
    if after is not None and await videos.store.find(after, owner) is None:
        raise RequestError(f"after: there is no video {after[:80]!r}", field="after")
    entries = await videos.store.page(owner, count + 1, after, is_ascending=order == "asc")
    found = [
        videos.running(entry.id, owner) or msgspec.json.decode(entry.body, type=VideoObject)
        for entry in entries[:count]
    ]
    ends = (found[0].id, found[-1].id) if found else (None, None)
    return exchange.json(VideoList(data=found, first_id=ends[0], last_id=ends[1], has_more=len(entries) > count))


async def _media(exchange: Exchange, body: VideoRequest, files: list[UploadedFile]) -> list[MediaPart]:
    """Return the images of a request: uploads, or the object's URL."""
    for file in files:
        if file.field not in (REFERENCE, f"{REFERENCE}[]"):
            raise RequestError(
                f"{file.field[:40]} is not supported by this route",
                hint=f"upload the image as `{REFERENCE}`",
                field=file.field[:40],
            )
    media = [part_of_upload("image", file, "image") for file in files]
    reference: Any = body.input_reference
    if reference is None:
        return media
    url = reference.get("image_url") if isinstance(reference, dict) else None
    if not isinstance(url, str):
        raise RequestError(
            "input_reference must be a file or an object with image_url",
            hint="upload the image, or send a data: URL",
            field=REFERENCE,
        )
    allowance = ByteAllowance(exchange.limits.max_body_bytes)
    return [*media, await part_of_url(REFERENCE, url, "image", exchange.service.fetcher, allowance)]


def _seconds(value: str | float | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError as error:
        raise RequestError("seconds must be a number", field="seconds") from error


async def _checked(exchange: Exchange, call: ParsedRequest) -> tuple[str, str]:
    """Let the processor check a request before it is accepted. Returns size and seconds of the video."""
    service = exchange.service
    inputs = await service.pool.prompt(service.prompt_of(call))
    facts = inputs.metadata.get("video", {})
    seconds = int(facts.get("frames") or 0) / int(facts.get("fps") or 24)
    return f"{facts.get('width')}x{facts.get('height')}", f"{seconds:g}"


async def _found(exchange: Exchange) -> VideoObject:
    owner, videos = owner_of(exchange.key), exchange.service.videos
    running = videos.running(exchange.path_name, owner)
    if running is not None:
        return running
    entry = await videos.store.find(exchange.path_name, owner)
    if entry is None:
        raise _unknown(exchange.path_name)
    return _object(entry)


def _object(entry: StoredVideo) -> VideoObject:
    return msgspec.json.decode(entry.body, type=VideoObject)


def _answer(exchange: Exchange, video: VideoObject) -> HTTPResponse:
    is_over = video.status in ("completed", "failed")
    return exchange.json(video, headers=None if is_over else {"openai-poll-after-ms": POLL_MS})


def _unknown(video_id: str) -> NotFound:
    """Return the error for an unknown id, which is also used for videos of other API keys."""
    return NotFound(
        f"there is no video {video_id[:80]!r}", hint="videos are stored for a while", code="video_not_found", field="id"
    )
