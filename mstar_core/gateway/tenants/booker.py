"""Booker: books the usage of requests from the reports of the deployments that ran them. Owned by the gate.

It follows every deployment that requests were forwarded to, those of an earlier gateway included, and reads all that a
deployment remembers whenever it connects. A request whose deployment has forgotten it, or died, is booked as unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

from mstar_core.gateway.fleet.hosts.names import admin_socket_of
from mstar_core.gateway.tenants import books
from mstar_core.gateway.tenants.admin_link import FAULTS, AdminLink, Watched
from mstar_core.gateway.tenants.books import UnsettledRequest
from mstar_core.gateway.tenants.figures import report_of
from mstar_core.gateway.tenants.store import Writer
from mstar_core.observe.frames import RequestStatus

RETRY_S: Final = 1.0
SWEEP_S: Final = 1.0
AGAIN_S: Final = 0.1
"""Interval of the reports of processes to their supervisor."""

LATE_S: Final = 5.0
"""Time after the end of a request in which its report arrives by itself; then its deployment is asked for it."""

LOST_S: Final = 60.0
"""Time after which the request of a deployment that does not answer is booked as unknown."""

UNFOLLOW_S: Final = 600.0
"""Time after which a deployment that does not answer is no longer followed."""

FORGET_S: Final = 3600.0

log = logging.getLogger("mstar.gateway")


class Booker:
    """Follows deployments. socket_of: admin socket of a deployment. clock: seconds since the epoch.

    watched: what it knows of deployments that answer, by name.
    """

    def __init__(
        self,
        writer: Writer,
        clock: Callable[[], float],
        *,
        socket_of: Callable[[str], Path] = admin_socket_of,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.watched: dict[str, Watched] = {}
        self._writer = writer
        self._clock = clock
        self._socket_of = socket_of
        self._on_change = on_change
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._seen: dict[str, float] = {}
        self._forgotten = clock()

    def follow(self, deployment: str) -> None:
        """Follow a deployment from now on."""
        if deployment not in self._tasks:
            self._seen[deployment] = self._clock()
            self._tasks[deployment] = asyncio.create_task(self._follow(deployment), name=f"usage of {deployment}")

    async def close(self) -> None:
        """Follow nothing any more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    async def catch_up(self, limit_s: float) -> None:
        """Read the reports of all followed deployments until their closed requests are settled, at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                closed = partial(books.unsettled, closed_before=self._clock() + 1.0)
                while any(self._is_due(each) for each in await self._writer.call(closed)):
                    await asyncio.gather(*(self._read_all(name) for name in self._tasks))
                    await asyncio.sleep(AGAIN_S)

    def _is_due(self, each: UnsettledRequest) -> bool:
        """Return whether a report of a request must be on its way."""
        return each.deployment in self._tasks and not each.is_refused

    async def sweep(self) -> None:
        """Settle requests whose report is late: their deployment is asked, and else their usage is unknown."""
        now = self._clock()
        silent: set[str] = set()
        for each in await self._writer.call(partial(books.unsettled, closed_before=now - LATE_S)):
            if each.deployment and not each.is_elsewhere:
                self.follow(each.deployment)
            await self._settle(each, now, silent)
        for name in [name for name, seen in self._seen.items() if now - seen > UNFOLLOW_S]:
            del self._seen[name]
            self._tasks.pop(name).cancel()
        if now - self._forgotten > FORGET_S:
            self._forgotten = now
            await self._writer.call(partial(books.forget, now=now))

    async def _settle(self, each: UnsettledRequest, now: float, silent: set[str]) -> None:
        """Settle one late request, unless it still runs or its deployment may still answer.

        silent: deployments that did not answer in this sweep, which are not asked again.
        """
        if not each.deployment:  # it was never forwarded, so it has used nothing
            await self._writer.call(partial(books.settle, number=each.number))
            return
        if each.is_elsewhere:  # its answer has named no usage
            unknown = not each.is_refused
            await self._writer.call(partial(books.settle, number=each.number, is_unknown=unknown))
            return
        is_remembered, status = False, None
        try:
            if each.deployment in silent:
                raise ConnectionError
            async with AdminLink(self._socket_of(each.deployment)) as link:
                start, status = await link.start(), await link.request(each.request)
            is_remembered = start.age_s >= now - each.admitted
        except FAULTS:
            silent.add(each.deployment)
            if now - each.closed < LOST_S:
                return
        if status is not None:
            if status.has_ended:
                reports = [report_of(status, each.deployment, start.boot)]
                await self._writer.call(partial(books.book, reports=reports))
            return
        # A deployment that ran all the time knows every request that it began, so this one has used nothing.
        is_unknown = not is_remembered and not each.is_refused
        await self._writer.call(partial(books.settle, number=each.number, is_unknown=is_unknown))

    async def _follow(self, deployment: str) -> None:
        while True:
            try:
                async with AdminLink(self._socket_of(deployment)) as link:
                    await self._book(deployment, (await link.start()).boot, await link.requests())
                    async for watched in link.watch():
                        self.watched[deployment] = watched
                        self._seen[deployment] = self._clock()
                        await self._book(deployment, watched.boot, watched.take())
                        self._on_change()
            except FAULTS as error:
                log.debug("a deployment does not answer", extra={"facts": {"name": deployment, "why": str(error)}})
            self.watched.pop(deployment, None)
            await asyncio.sleep(RETRY_S)

    async def _read_all(self, deployment: str) -> None:
        with contextlib.suppress(*FAULTS):
            async with AdminLink(self._socket_of(deployment)) as link:
                await self._book(deployment, (await link.start()).boot, await link.requests())

    async def _book(self, deployment: str, boot: str, requests: Iterable[RequestStatus]) -> None:
        reports = [report_of(request, deployment, boot) for request in requests if request.has_ended]
        if reports:
            await self._writer.call(partial(books.book, reports=reports))
