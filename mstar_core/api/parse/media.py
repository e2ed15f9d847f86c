"""Media of a request: uploads, base64, data: URLs and URLs fetched from allowed hosts. Used by routes."""

from __future__ import annotations

import asyncio
import binascii
import ipaddress
import socket
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import httpx
import pybase64

from mstar_core.api.errors import UnsupportedType
from mstar_core.api.http.body import UploadedFile
from mstar_core.errors import BadMedia, MstarError, RequestError, TooLarge
from mstar_core.plugin.processor import MediaPart

FETCH_S: Final = 20.0
MAX_REDIRECTS: Final = 3
AT_ONCE: Final = 16
"""Limit of concurrent fetches of all requests."""

PORTS: Final = {"http": 80, "https": 443}
REDIRECTS: Final = (301, 302, 303, 307, 308)


Address = ipaddress.IPv4Address | ipaddress.IPv6Address

TUNNELS: Final = tuple(
    ipaddress.IPv6Network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")
)
"""IPv6 ranges that embed an IPv4 address: translation, 6to4, Teredo, IPv4-compatible."""

UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""All IPv6 addresses assigned for global use (RFC 4291, IANA), unlike fec0::/10 and others."""

SPECIAL: Final = tuple(
    ipaddress.ip_network(text) for text in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "3fff::/20")
)
"""Ranges for protocols and documentation that some releases of `ipaddress` report as global."""


def is_public(address: Address) -> bool:
    """Return whether an address is publicly routable. IPv4-mapped addresses are checked as IPv4."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address not in UNICAST or any(address in tunnel for tunnel in TUNNELS):
            return False
    if any(address in network for network in SPECIAL):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


@dataclass(slots=True)
class ByteAllowance:
    """Remaining bytes of all URLs of one request. Owned by the request."""

    left_bytes: int

    def take(self, size: int) -> bool:
        """Deduct bytes. Returns False if the allowance is exceeded."""
        self.left_bytes -= size
        return self.left_bytes >= 0


Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host and port to addresses, as text."""


class Fetcher:
    """HTTP(S) client for allowed hosts. resolve, transport, may_connect: replaced by tests."""

    def __init__(
        self,
        hosts: Sequence[str],
        limit_bytes: int,
        *,
        resolve: Resolve | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        may_connect: Callable[[Address], bool] = is_public,
        limit_s: float = FETCH_S,
    ) -> None:
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._limit_bytes = limit_bytes
        self._resolve = resolve or _resolve
        self._transport = transport
        self._may_connect = may_connect
        self._limit_s = limit_s
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def fetch(self, text: str, field: str, allowance: ByteAllowance | None = None) -> bytes:
        """Return the content of a URL. field: its position in the request. allowance: shared by the request.

        Raises RequestError (`remote_media_disabled`, `invalid_value`), TooLarge, BadMedia (`media_unreachable`).
        """
        url = self.check(text, field)
        allowance = allowance or ByteAllowance(self._limit_bytes)
        try:
            async with asyncio.timeout(self._limit_s), self._turns, self._client() as client:
                for _ in range(MAX_REDIRECTS + 1):
                    body = await self._get(client, url, await self._address(url, field), field, allowance)
                    if isinstance(body, bytes):
                        return body
                    url = self.check(_joined(url, body, field), field)
        except TimeoutError as error:
            raise _unreachable(field, f"no response within {self._limit_s:g} s") from error
        raise _unreachable(field, f"more than {MAX_REDIRECTS} redirects")

    def check(self, text: str, field: str) -> httpx.URL:
        """Return the URL if its form and host are allowed. Raises RequestError."""
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, ValueError) as error:
            raise _bad_url(field, "it cannot be parsed") from error
        if url.scheme not in PORTS:
            raise _bad_url(field, "the scheme must be data:, http: or https:")
        if url.userinfo:
            raise _bad_url(field, "it contains a user name")
        host = url.host.lower().rstrip(".")
        if not host:
            raise _bad_url(field, "it has no host")
        port = PORTS[url.scheme] if url.port is None else url.port
        if not 0 < port < 65_536:
            raise _bad_url(field, "its port is out of range")
        is_named = host in self._hosts and port == PORTS[url.scheme]
        if not is_named and f"{host}:{port}" not in self._hosts:
            hint = "send the content as a data: URL" + (
                ", or ask the operator to allow the host" if self._hosts else ""
            )
            raise RequestError(
                "fetching media from this host is not allowed", hint=hint, field=field, code="remote_media_disabled"
            )
        return url

    def _client(self) -> httpx.AsyncClient:
        # Accept only uncompressed bodies, because a compressed one could expand without limit. No proxy, cookies or
        # credentials.
        headers = {"Accept-Encoding": "identity", "User-Agent": "mstar"}
        return httpx.AsyncClient(
            headers=headers, transport=self._transport, trust_env=False, follow_redirects=False, timeout=self._limit_s
        )

    async def _address(self, url: httpx.URL, field: str) -> Address:
        """Return the checked address of a URL's host."""
        port = url.port or PORTS[url.scheme]
        try:
            texts = await self._resolve(url.raw_host.decode(), port)  # as used in Host and SNI
            addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in texts]
        except (OSError, ValueError, UnicodeError) as error:
            raise _unreachable(field, "its host cannot be resolved") from error
        if not addresses or not all(self._may_connect(address) for address in addresses):
            raise RequestError(
                "fetching media from this host is not allowed",
                hint="not all of its addresses are public",
                field=field,
                code="remote_media_disabled",
            )
        return addresses[0]

    async def _get(
        self, client: httpx.AsyncClient, url: httpx.URL, address: Address, field: str, allowance: ByteAllowance
    ) -> bytes | str:
        """Return the content, or the location of a redirect. Connects to the checked address."""
        request = client.build_request(
            "GET",
            url.copy_with(host=str(address)),
            headers={"Host": url.netloc.decode()},
            extensions={"sni_hostname": url.raw_host.decode()},
        )
        try:
            answer = await client.send(request, stream=True)
            try:
                return await self._content(answer, field, allowance)
            finally:
                await answer.aclose()
        except MstarError:
            raise
        except httpx.HTTPError as error:
            raise _unreachable(field, type(error).__name__) from error

    async def _content(self, answer: httpx.Response, field: str, allowance: ByteAllowance) -> bytes | str:
        if answer.status_code in REDIRECTS and "location" in answer.headers:
            return str(answer.headers["location"])
        if answer.status_code != 200:
            raise _unreachable(field, f"its host responded with status {answer.status_code}")
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise _unreachable(field, "its host sent compressed data")
        parts, size = [], 0
        async for part in answer.aiter_raw():
            size += len(part)
            if size > self._limit_bytes or not allowance.take(len(part)):
                raise TooLarge(
                    f"the media of the request is larger than {self._limit_bytes} bytes",
                    field=field,
                    code="media_too_large",
                )
            parts.append(part)
        return b"".join(parts)


def _joined(url: httpx.URL, location: str, field: str) -> str:
    """Return the target of a redirect. Raises BadMedia if it cannot be parsed."""
    try:
        return str(url.join(location))
    except (httpx.InvalidURL, ValueError) as error:
        raise _unreachable(field, "its host sent an invalid redirect") from error


async def _resolve(host: str, port: int) -> Sequence[str]:
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in addresses))


def _bad_url(field: str, why: str) -> RequestError:
    return RequestError(
        f"the URL cannot be used: {why}", hint="use a data: URL, or http(s): with an allowed host", field=field
    )


def _unreachable(field: str, why: str) -> BadMedia:
    return BadMedia(
        f"the media could not be fetched: {why}",
        hint="send the content as a data: URL",
        field=field,
        code="media_unreachable",
    )


INLINE_BYTES: Final = 8 << 20
"""Base64 up to this size is decoded on the event loop (0.3 ms), longer base64 on a thread."""

NAME_CHARS: Final = 200


def part_of_upload(field: str, upload: UploadedFile, expected: str | None = None) -> MediaPart:
    """Return an uploaded file as media. wanted: modality of the field. Raises UnsupportedType."""
    modality = checked(sniff(upload.data[:64], upload.name, upload.content_type), expected, field)
    return MediaPart(modality=modality, data=upload.data, name=upload.name[:NAME_CHARS])


async def part_of_url(field: str, url: str, expected: str, fetcher: Fetcher, allowance: ByteAllowance) -> MediaPart:
    """Return the media of a URL; never reads local files. Raises RequestError, UnsupportedType, BadMedia."""
    if url[:5].lower() == "data:":
        kind, data = await data_of_url(field, url)
    else:
        kind, data = "", await fetcher.fetch(url, field, allowance)
    return MediaPart(modality=checked(sniff(data[:64], "", kind), expected, field), data=data)


async def part_of_base64(field: str, text: str, expected: str) -> MediaPart:
    """Return base64 data as media. Raises RequestError, UnsupportedType."""
    data = await decoded(field, text)
    return MediaPart(modality=checked(sniff(data[:64]), expected, field), data=data)


async def data_of_url(field: str, url: str) -> tuple[str, bytes]:
    """Return content type and data of a `data:` URL (RFC 2397). Raises RequestError."""
    comma = url.find(",", 5)
    if comma < 0:
        raise RequestError("the data: URL has no comma", field=field)
    words, body = [word.strip().lower() for word in url[5:comma].split(";")], url[comma + 1 :]  # one copy of megabytes
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
        try:
            return pybase64.b64decode(text, validate=True)
        except binascii.Error:
            return pybase64.b64decode("".join(text.split()), validate=True)
    except (ValueError, binascii.Error) as error:
        raise RequestError("the data is not valid base64", field=field) from error


def checked(modality: str | None, expected: str | None, field: str) -> str:
    """Check a detected modality; video is accepted for its audio track. Raises UnsupportedType."""
    if modality is None:
        raise UnsupportedType("the file type is not recognized", field=field, code="unsupported_media_type")
    if expected in (None, modality):
        return modality
    if expected == "audio" and modality == "video":
        return "audio"
    raise UnsupportedType(f"{field} contains {modality}, not {expected}", field=field, code="unsupported_media_type")


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
