"""Fetches media from hosts that the operator named. Owned by the service; a request that goes away ends its fetches.

The address that was checked is the address that is connected to, so that a name which changes its mind between the two
gains nothing. Each redirect is judged like a new URL.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import httpx

from mstar_core.errors import BadMedia, MstarError, RequestError, TooLarge

FETCH_S: Final = 20.0
MAX_REDIRECTS: Final = 3
AT_ONCE: Final = 16
"""Fetches of all requests together."""

PORTS: Final = {"http": 80, "https": 443}
REDIRECTS: Final = (301, 302, 303, 307, 308)


Address = ipaddress.IPv4Address | ipaddress.IPv6Address

TUNNELS: Final = tuple(
    ipaddress.IPv6Network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")
)
"""IPv6 ranges that carry an IPv4 address inside: translation, 6to4, Teredo, IPv4-compatible."""

UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""All IPv6 addresses that were ever given out for the internet (RFC 4291, IANA); no other is one, as fec0::/10."""

SPECIAL: Final = tuple(
    ipaddress.ip_network(text) for text in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "3fff::/20")
)
"""Ranges for protocols and documents that some releases of `ipaddress` take for public."""


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet. An IPv4 address in IPv6 clothes is judged as what it is."""
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
    """What the URLs of one request may still bring, all together. Owned by the request."""

    left_bytes: int

    def take(self, size: int) -> bool:
        """Whether that many bytes were left."""
        self.left_bytes -= size
        return self.left_bytes >= 0


Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host and port, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTarget:
    """One URL that may be fetched. address: the one that was checked."""

    url: httpx.URL
    address: Address

    @property
    def pinned(self) -> httpx.URL:
        """The same URL with the address in place of the name."""
        return self.url.copy_with(host=str(self.address))


class Fetcher:
    """Fetches by GET, over http and https, from allowed hosts. resolve, transport, may_connect: given by tests."""

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
        """The content of a URL. field: where it stands in the request. allowance: of the whole request.

        Raises RequestError (`remote_media_disabled`, `invalid_value`), TooLarge, BadMedia (`media_unreachable`).
        """
        url = self.check(text, field)
        allowance = allowance or ByteAllowance(self._limit_bytes)
        try:
            async with asyncio.timeout(self._limit_s), self._turns, self._client() as client:
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._get(client, await self._goal(url, field), field, allowance)
                    if isinstance(found, bytes):
                        return found
                    url = self.check(_joined(url, found, field), field)
        except TimeoutError as error:
            raise _unreachable(field, f"not within {self._limit_s:g} s") from error
        raise _unreachable(field, f"more than {MAX_REDIRECTS} redirects")

    def check(self, text: str, field: str) -> httpx.URL:
        """The URL if its form and host are allowed. Raises RequestError."""
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, ValueError) as error:
            raise _bad_url(field, "it cannot be read") from error
        if url.scheme not in PORTS:
            raise _bad_url(field, "it is neither data:, http: nor https:")
        if url.userinfo:
            raise _bad_url(field, "it holds a user name")
        host = url.host.lower().rstrip(".")
        if not host:
            raise _bad_url(field, "it names no host")
        port = PORTS[url.scheme] if url.port is None else url.port
        if not 0 < port < 65_536:
            raise _bad_url(field, "its port does not exist")
        is_named = host in self._hosts and port == PORTS[url.scheme]
        if not is_named and f"{host}:{port}" not in self._hosts:
            hint = "send the content as a data: URL" + (
                ", or ask the operator to allow the host" if self._hosts else ""
            )
            raise RequestError(
                "media is not fetched from this host", hint=hint, field=field, code="remote_media_disabled"
            )
        return url

    def _client(self) -> httpx.AsyncClient:
        # identity: a compressed body could unfold without bound. No proxy, no cookies, no credentials of this host.
        headers = {"Accept-Encoding": "identity", "User-Agent": "mstar"}
        return httpx.AsyncClient(
            headers=headers, transport=self._transport, trust_env=False, follow_redirects=False, timeout=self._limit_s
        )

    async def _goal(self, url: httpx.URL, field: str) -> FetchTarget:
        port = url.port or PORTS[url.scheme]
        try:
            texts = await self._resolve(url.raw_host.decode(), port)  # as it stands in Host and SNI
            addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in texts]
        except (OSError, ValueError, UnicodeError) as error:
            raise _unreachable(field, "its host has no address") from error
        if not addresses or not all(self._may_connect(address) for address in addresses):
            raise RequestError(
                "media is not fetched from this host", hint="not all of its addresses are public", field=field,
                code="remote_media_disabled",
            )  # fmt: skip
        return FetchTarget(url=url, address=addresses[0])

    async def _get(
        self, client: httpx.AsyncClient, goal: FetchTarget, field: str, allowance: ByteAllowance
    ) -> bytes | str:
        """The content, or where a redirect points."""
        name = goal.url.raw_host.decode()
        request = client.build_request(
            "GET", goal.pinned, headers={"Host": goal.url.netloc.decode()}, extensions={"sni_hostname": name}
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
            raise _unreachable(field, f"its host answered {answer.status_code}")
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise _unreachable(field, "its host sent it compressed")
        parts, size = [], 0
        async for part in answer.aiter_raw():
            size += len(part)
            if size > self._limit_bytes or not allowance.take(len(part)):
                raise TooLarge(
                    f"the media has, or all of the request have, more than {self._limit_bytes} bytes", field=field,
                    code="media_too_large",
                )  # fmt: skip
            parts.append(part)
        return b"".join(parts)


def _joined(url: httpx.URL, location: str, field: str) -> str:
    """Where a redirect points. Raises BadMedia for one that points nowhere."""
    try:
        return str(url.join(location))
    except (httpx.InvalidURL, ValueError) as error:
        raise _unreachable(field, "its host sent a redirect that cannot be read") from error


async def _resolve(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _bad_url(field: str, why: str) -> RequestError:
    return RequestError(f"the URL is not usable: {why}", hint="send data:, or http(s): of an allowed host", field=field)


def _unreachable(field: str, why: str) -> BadMedia:
    return BadMedia(
        f"the media could not be fetched: {why}", hint="send the content as a data: URL", field=field,
        code="media_unreachable",
    )  # fmt: skip
