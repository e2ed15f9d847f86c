"""Media of a request: uploads, base64, `data:` URLs and fetched URLs, with their modality. Used by routes."""

from __future__ import annotations

import asyncio
import base64
import binascii
import urllib.parse
from typing import Final

from mstar_core.api.errors import UnsupportedType
from mstar_core.api.http.body import UploadedFile
from mstar_core.api.parse.fetch import ByteAllowance, Fetcher
from mstar_core.errors import RequestError
from mstar_core.plugin.processor import MediaPart

INLINE_BYTES: Final = 512 * 1024
"""Base64 up to this size is decoded on the event loop, longer base64 on a thread."""

NAME_CHARS: Final = 200


async def part_of_upload(field: str, upload: UploadedFile, wanted: str | None = None) -> MediaPart:
    """Return an uploaded file as media. wanted: modality of the field. Raises UnsupportedType."""
    modality = checked(sniff(upload.head(), upload.name, upload.content_type), wanted, field)
    data = upload.read() if upload.is_in_memory else await asyncio.to_thread(upload.read)
    return MediaPart(modality=modality, data=data, name=upload.name[:NAME_CHARS])


async def part_of_url(field: str, url: str, wanted: str, fetcher: Fetcher, allowance: ByteAllowance) -> MediaPart:
    """Return the media of a URL; never reads local files. Raises RequestError, UnsupportedType, BadMedia."""
    if url[:5].lower() == "data:":
        kind, data = await data_of_url(field, url)
    else:
        kind, data = "", await fetcher.fetch(url, field, allowance)
    return MediaPart(modality=checked(sniff(data[:64], "", kind), wanted, field), data=data)


async def part_of_base64(field: str, text: str, wanted: str) -> MediaPart:
    """Return base64 data as media. Raises RequestError, UnsupportedType."""
    data = await decoded(field, text)
    return MediaPart(modality=checked(sniff(data[:64]), wanted, field), data=data)


async def data_of_url(field: str, url: str) -> tuple[str, bytes]:
    """Return content type and data of a `data:` URL (RFC 2397). Raises RequestError."""
    head, comma, body = url[5:].partition(",")
    if not comma:
        raise RequestError("the data: URL has no comma", field=field)
    words = [word.strip().lower() for word in head.split(";")]
    if words[-1] == "base64":
        return words[0], await decoded(field, urllib.parse.unquote(body) if "%" in body else body)
    return words[0], urllib.parse.unquote_to_bytes(body)


async def decoded(field: str, text: str) -> bytes:
    """Decode base64; line breaks are allowed. Raises RequestError."""
    if len(text) > INLINE_BYTES:
        return await asyncio.to_thread(_decode, field, text)
    return _decode(field, text)


def _decode(field: str, text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (ValueError, binascii.Error) as error:
        raise RequestError("the data is not valid base64", field=field) from error


def checked(found: str | None, wanted: str | None, field: str) -> str:
    """Check a detected modality; video is accepted for its audio track. Raises UnsupportedType."""
    if found is None:
        raise UnsupportedType("the file type is not recognized", field=field, code="unsupported_media_type")
    if wanted in (None, found):
        return found
    if wanted == "audio" and found == "video":
        return "audio"
    raise UnsupportedType(f"{field} contains {found}, not {wanted}", field=field, code="unsupported_media_type")


MATROSKA: Final = b"\x1aE\xdf\xa3"
MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", "image"),
    (b"\xff\xd8\xff", "image"),
    (b"GIF8", "image"),
    (b"BM", "image"),
    (b"II*\x00", "image"),
    (b"MM\x00*", "image"),
    (b"fLaC", "audio"),
    (b"ID3", "audio"),
    (b"OggS", "audio"),
    *((bytes((0xFF, second)), "audio") for second in (0xE2, 0xE3, *range(0xF0, 0xF6), *range(0xF8, 0xFE))),
    (MATROSKA, "video"),
    (b"\x93NUMPY", "tensor"),
)
RIFF: Final = {b"WEBP": "image", b"WAVE": "audio", b"AVI ": "video"}
AUDIO_BRANDS: Final = (b"M4A ", b"M4B ")


def sniff(head: bytes, name: str = "", content_type: str = "") -> str | None:
    """Return the modality of a file from its first 16 bytes, name and content type; None if unknown."""
    if head[:4] == b"RIFF":
        return RIFF.get(head[8:12])
    if head[4:8] == b"ftyp":
        is_audio = head[8:12] in AUDIO_BRANDS or content_type.startswith("audio/") or name.lower().endswith(".m4a")
        return "audio" if is_audio else "video"
    if head.startswith(b"OggS") and (content_type.startswith("video/") or name.lower().endswith(".ogv")):
        return "video"
    if head.startswith(MATROSKA) and content_type.startswith("audio/"):
        return "audio"  # as recorded by browsers
    for magic, modality in MAGIC:
        if head.startswith(magic):
            return modality
    if name.lower().endswith(".safetensors") and head[8:9] == b"{":
        return "tensor"
    return None
