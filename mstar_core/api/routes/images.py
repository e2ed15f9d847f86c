"""POST /v1/images/generations and /v1/images/edits: a prompt, optionally with images, in; images out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
import pybase64
from msgspec import UNSET
from sanic.response import HTTPResponse

from mstar_core.api.exchange import PING, Exchange, event, streaming
from mstar_core.api.group import Group, GroupPart, open_group
from mstar_core.api.http.body import UploadedFile, check_size
from mstar_core.api.output.encode import EncodedChunk
from mstar_core.api.output.kept_events import EVENTS
from mstar_core.api.parse.media import part_of_upload
from mstar_core.api.parse.params import ParsedRequest, check_images, count_order, mapped_fields
from mstar_core.api.routes.fields import (
    check_count,
    check_name,
    openai_parsed,
    read_body,
    read_multipart,
)
from mstar_core.api.schema import ImageEvent, ImageRequest, Images, ImagesUsage, ImageUsage, MadeImage
from mstar_core.errors import EngineError, RequestError
from mstar_core.plugin.params import param_specs
from mstar_core.plugin.processor import MediaPart
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import PARTIAL_IMAGE

IMAGE_FIELDS: Final = ("image", "image[]")


async def image(exchange: Exchange) -> HTTPResponse | None:
    """Generate images from a prompt."""
    body, rest = await read_body(exchange, ImageRequest)
    return await _generate(exchange, body, rest, ())


async def image_edit(exchange: Exchange) -> HTTPResponse | None:
    """Edit images by a prompt."""
    body, rest, files = await read_multipart(exchange, ImageRequest)
    if "mask" in rest:
        raise RequestError("mask is not supported", hint="omit it", field="mask", code="unsupported_parameter")
    return await _generate(exchange, body, rest, _images(exchange.service.model, files))


async def _generate(
    exchange: Exchange, body: ImageRequest, rest: dict[str, Any], media: Sequence[MediaPart]
) -> HTTPResponse | None:
    count = check_count(exchange, body.n)
    call = _call(exchange, body, rest, media)
    exchange.keep_events(EVENTS if body.stream else None)
    async with open_group(exchange, call, count) as group:
        if body.stream:
            await _stream(exchange, body, group)
            return None
        chunks: list[list[EncodedChunk]] = [[] for _ in group.calls]
        async for piece in group.pieces():
            if piece is not None:
                chunks[piece.index] += piece.chunks
        images = [await _image(exchange, body, group, index, parts) for index, parts in enumerate(chunks)]
        exchange.warn(group.warnings)
        usage = msgspec.convert({**group.usage, **_usage(group.usage)}, ImagesUsage)
        answer = Images(created=int(exchange.created), data=images, usage=usage, output_format=body.output_format)
        return exchange.json(answer)


def _call(exchange: Exchange, body: ImageRequest, rest: dict[str, Any], media: Sequence[MediaPart]) -> ParsedRequest:
    spec = exchange.service.model
    check_name(exchange, body.model)
    _check_stream(exchange, body)
    if not body.prompt.strip():
        raise RequestError("prompt is empty", hint="describe the image", field="prompt")
    check_size("prompt", len(body.prompt.encode()), exchange.limits)
    outputs = ("image", *(kind for kind in spec.surface(exchange.route).beside if kind != "image"))
    values, warnings = _sized(spec, exchange.route, body.size, rest)
    kinds = outputs
    if body.partial_images:
        values, kinds = {**values, "partial_images": body.partial_images}, (*outputs, PARTIAL_IMAGE)
    params = openai_parsed(exchange, values, outputs, {"size": body.size} if body.size else None)
    params = replace(params, warnings=(*params.warnings, *warnings))
    order = [*count_order([part.modality for part in media]), ("text", 0)]
    return params.request(
        exchange.request_id, exchange.route, text=body.prompt, media=media, order=order, outputs=kinds
    )


def _sized(
    spec: ModelSpec, route: str, size: str | None, rest: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Apply `size` as width and height if the model has these parameters; explicit width and height win."""
    if size in (None, "auto") or "size" in mapped_fields(spec, route):
        return rest, ()
    names = {param.name for param in param_specs(spec.params)}
    if not {"width", "height"} <= names:
        return rest, ("size has no effect on this model",)
    width, _, height = str(size).partition("x")
    return {"width": int(width), "height": int(height), **rest}, ()


def _images(spec: ModelSpec, files: Sequence[UploadedFile]) -> list[MediaPart]:
    for field in (file.field for file in files):
        if field not in IMAGE_FIELDS:
            code = "unsupported_parameter" if field == "mask" else "invalid_value"
            raise RequestError(
                f"{field[:40]} is not supported by this route",
                hint="upload images as `image`",
                field=field[:40],
                code=code,
            )
    if not files:
        raise RequestError("image is missing", hint="upload it as `image`", field="image", code="missing_field")
    check_images(spec, len(files), "image")
    return [part_of_upload("image", file, "image") for file in files]


def _check_stream(exchange: Exchange, body: ImageRequest) -> None:
    """Refuse what streams, or answers without one, cannot do."""
    if body.partial_images and not body.stream:
        raise RequestError("partial_images needs a stream", hint="send stream: true", field="partial_images")
    if body.partial_images and not exchange.service.emits_partial_images:
        raise RequestError(
            "partial_images is not supported by this model",
            hint="omit it",
            field="partial_images",
            code="unsupported_parameter",
        )
    if body.stream and body.response_format == "url":
        raise RequestError(
            "response_format is url, but streams send b64_json",
            hint="omit it",
            field="response_format",
            allowed="b64_json",
            code="unsupported_parameter",
        )


async def _stream(exchange: Exchange, body: ImageRequest, group: Group) -> None:
    """Send each image as an event when it is made, and before it its partial images."""
    chunks: list[list[EncodedChunk]] = [[] for _ in group.calls]
    kind = "image_edit" if exchange.route == "image_edit" else "image_generation"
    async with streaming(exchange):
        async for piece in group.pieces():
            if piece is None:
                await exchange.keep_alive(PING, EVENTS, group.left_s)
                continue
            exchange.warn(group.warnings)
            events = []
            for chunk in piece.chunks:
                if chunk.modality != PARTIAL_IMAGE:
                    chunks[piece.index].append(chunk)
                    continue
                told = await _event(exchange, body, f"{kind}.partial_image", piece.index, chunk)
                told.partial_image_index = sum(each.modality == PARTIAL_IMAGE for each in chunks[piece.index])
                chunks[piece.index].append(chunk)
                events.append(event(told))
            if piece.done is not None:
                last = await _completed(exchange, body, f"{kind}.completed", group, piece, chunks[piece.index])
                events.append(event(last))
            if events:
                await exchange.send(events, EVENTS, group.left_s, is_last=group.is_done)


async def _completed(
    exchange: Exchange, body: ImageRequest, kind: str, group: Group, piece: GroupPart, chunks: Sequence[EncodedChunk]
) -> ImageEvent:
    """Return the last event of an image. Raises EngineError if there is none."""
    image = next((chunk for chunk in chunks if chunk.modality == "image"), None)
    if image is None or piece.done is None:
        raise EngineError("the model returned no image")
    told = await _event(exchange, body, kind, piece.index, image)
    thought = "".join(chunk.data.decode() for chunk in chunks if chunk.modality == "text")
    told.usage = msgspec.convert(_usage(piece.done.usage), ImageUsage)
    told.seed = group.calls[piece.index].seed
    told.revised_prompt = thought or UNSET
    return told


def _usage(used: Mapping[str, Any]) -> dict[str, Any]:
    """Return usage by the names of OpenAI's image routes."""
    images = int(used.get("prompt_tokens_details", {}).get("image_tokens", 0))
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {"image_tokens": images, "text_tokens": used["prompt_tokens"] - images},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"image_tokens": 0, "text_tokens": used["completion_tokens"]},
        "total_tokens": used["total_tokens"],
    }


async def _event(exchange: Exchange, body: ImageRequest, kind: str, index: int, chunk: EncodedChunk) -> ImageEvent:
    size = f"{chunk.metadata.get('width', 0)}x{chunk.metadata.get('height', 0)}"
    data = pybase64.b64encode_as_string(await _file(exchange, body, chunk.data))
    return ImageEvent(
        type=kind, b64_json=data, created_at=int(time.time()), size=size, output_format=body.output_format, index=index
    )


async def _file(exchange: Exchange, body: ImageRequest, file: bytes) -> bytes:
    """Return a PNG in the format of the request."""
    if body.output_format == "png":
        return file
    service = exchange.service
    return await service.pool.recode(file, body.output_format, service.limits)


async def _image(
    exchange: Exchange, body: ImageRequest, group: Group, index: int, chunks: Sequence[EncodedChunk]
) -> MadeImage:
    file = next((chunk.data for chunk in chunks if chunk.modality == "image"), None)
    if file is None:
        raise EngineError("the model returned no image")
    file = await _file(exchange, body, file)
    thought = "".join(chunk.data.decode() for chunk in chunks if chunk.modality == "text")
    data = pybase64.b64encode_as_string(file)
    is_url = body.response_format == "url"
    return MadeImage(
        b64_json=None if is_url else data,
        url=f"data:image/{body.output_format};base64,{data}" if is_url else None,
        seed=group.calls[index].seed,
        revised_prompt=thought or None,
    )
