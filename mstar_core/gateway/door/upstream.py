"""Requests to replicas: one attempt after the other until one has begun, and the bytes of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from aiohttp import web
from yarl import URL

from mstar_core.errors import Unavailable
from mstar_core.gateway.door.ask import Ask
from mstar_core.gateway.door.headers import answer_headers, request_headers
from mstar_core.gateway.door.replies import UpstreamLost
from mstar_core.gateway.parts import Gate, Replica

CONNECT_S: Final = 5.0
IDLE_S: Final = 60.0
"""Time for which an idle connection is kept: half of that of a deployment, so that it is never closed in between."""

NOT_BEGUN: Final = (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError)
"""Errors of a connection that was never opened, so that no request was sent on it."""

_UNSENT: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


def open_session() -> aiohttp.ClientSession:
    """Return the session of all requests to deployments. It changes nothing of what it carries."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    return aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        skip_auto_headers=_UNSENT,
        trust_env=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """Requests to the replicas of one door. gate: says whose the keys of requests are."""

    session: aiohttp.ClientSession
    gate: Gate

    async def begin(
        self, ask: Ask, replicas: Sequence[Replica], sent: Callable[[Replica], None], retried: Callable[[], None]
    ) -> tuple[Replica, aiohttp.ClientResponse]:
        """Send a request to the first replica that takes it, and return its answer with the head read.

        The next replica is tried if the connection was refused, or if the answer is 503 and the body can be sent again.
        Raises Unavailable if none takes it, UpstreamLost if one ended the connection before it answered.
        """
        for number, replica in enumerate(replicas):
            is_last = number + 1 == len(replicas)
            if number:
                retried()
            sent(replica)
            try:
                response = await self._request(ask, replica)
            except NOT_BEGUN as error:
                if is_last or not ask.is_replayable:
                    raise _unreachable(replica) from error
                continue
            except (aiohttp.ClientError, OSError) as error:
                if ask.fault is not None:
                    raise ask.fault from error
                raise UpstreamLost(f"{replica.deployment} ended the connection", hint="send it again") from error
            if response.status == 503 and not is_last and ask.is_replayable:
                response.close()
                continue
            return replica, response
        raise Unavailable("no replica takes requests", hint="retry later")

    async def _request(self, ask: Ask, replica: Replica) -> aiohttp.ClientResponse:
        headers = request_headers(
            ask.request.headers,
            replica,
            ask.request_id,
            ask.peer,
            takes_keys=self.gate.takes_keys,
            prefix=ask.parts.prefix,
            tenant=ask.tenant,
        )
        response: aiohttp.ClientResponse = await self.session.request(
            ask.request.method,
            URL(f"{replica.url}{ask.parts.raw}", encoded=True),
            headers=headers,
            data=ask.body(),
            allow_redirects=False,
            ssl=not replica.is_local,
        )
        return response


def _unreachable(replica: Replica) -> Unavailable:
    return Unavailable(
        f"{replica.deployment} does not accept connections", hint="retry later", code="unreachable", retry_after_s=2
    )


def answer_of(response: aiohttp.ClientResponse) -> web.StreamResponse:
    """Return the answer to the client, with the status and headers of the deployment's."""
    headers = answer_headers(response.headers.items(), response.headers.get("Connection", ""))
    return web.StreamResponse(status=response.status, reason=response.reason, headers=headers)


async def relay(
    response: aiohttp.ClientResponse,
    answer: web.StreamResponse,
    first: Callable[[bytes], None],
    each: Callable[[bytes], None] | None = None,
) -> int:
    """Copy a body to the client as it arrives, and return the number of pieces.

    first: called with the first piece. each: called with every piece before it is sent.

    Each write waits until the client has taken what was written before, which stops the reading from the deployment.
    Cost per piece: one read, one write, no copy of its own. Raises aiohttp.ClientError if the deployment ends early.
    """
    read: Any = response.content.readany
    count = 0
    while piece := await read():
        if each is not None:
            each(piece)
        await answer.write(piece)
        if not count:
            first(piece)
        count += 1
    return count


def abort(request: web.BaseRequest) -> None:
    """Close the client's connection without an end of the body, so that it cannot take a part for the whole."""
    if request.transport is not None:
        request.transport.abort()


async def read_some(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the first bytes of a body, at most `limit`."""
    with suppress(aiohttp.ClientError, asyncio.IncompleteReadError):
        body: bytes = await response.content.read(limit)
        return body
    return b""
