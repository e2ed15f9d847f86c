"""Gate of a gateway: admits requests by keys, rights, quotas and fair order, and counts their usage."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from mstar_core.errors import ConfigError, NotFound, Overloaded, Unavailable
from mstar_core.gateway.fleet.hosts.names import admin_socket_of
from mstar_core.gateway.parts import AnsweredUsage, Replica, RequestFacts, TenantStanding
from mstar_core.gateway.serve_file import ServeFile
from mstar_core.gateway.tenants import books, quotas
from mstar_core.gateway.tenants.accounts.directory import Directory
from mstar_core.gateway.tenants.accounts.tenant_file import TenantFile
from mstar_core.gateway.tenants.accounts.terms import Terms
from mstar_core.gateway.tenants.booker import SWEEP_S, Booker
from mstar_core.gateway.tenants.books import Entry
from mstar_core.gateway.tenants.figures import Figures
from mstar_core.gateway.tenants.lanes import Lane
from mstar_core.gateway.tenants.presence import Presence
from mstar_core.gateway.tenants.quotas import Reserved, headers_of
from mstar_core.gateway.tenants.standing import read_standings
from mstar_core.gateway.tenants.store import Operation, Writer, opened
from mstar_core.host.api_keys import read_keys

EXPECTED_TOKENS: Final = 1024
"""Tokens that a request reserves if it does not limit its output."""

EXPECTED_AUDIO_S: Final = 30.0
"""Seconds of audio that a request to a route of sound reserves."""

SOUND: Final = ("/v1/audio/", "/v1/realtime")
SESSIONS: Final = ("/v1/realtime",)
"""Routes whose connections outlive requests, so that they do not wait for a slot of the model."""

MOST_WAITING: Final = 1024
"""Requests of one model that wait in this gateway."""

SPARE: Final = 8
"""One request for so many slots waits at its replica: no slot is ever empty, and the fleet sees that requests queue."""

MOST_WORK: Final = 32_768.0
"""Most tokens that count for the fair order, as a client may ask for any number of them."""

LAST_REPORTS_S: Final = 2.0

UNLIMITED: Final = Reserved()

T = TypeVar("T")

log = logging.getLogger("mstar.gateway")


class Noted:
    """Journal entry of a request. number: None until it is written down. Used by operations of the store alone."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number: int | None = None


class TenantPermit:
    """The permit of an admitted request. Ended by `close`, once."""

    __slots__ = ("_gate", "_is_closed", "_lane", "_left", "_noted", "_tenant", "_writing")

    def __init__(
        self,
        gate: TenantGate,
        tenant: str,
        noted: Noted | None = None,
        *,
        writing: Future[Reserved] | None = None,
        left: Reserved = UNLIMITED,
        lane: Lane | None = None,
    ) -> None:
        """noted: None for a request that runs no model. writing: its operation of the store, while it may be queued."""
        self._gate = gate
        self._tenant = tenant
        self._noted = noted
        self._writing = writing
        self._left = left
        self._lane = lane
        self._is_closed = False

    @property
    def tenant(self) -> str:
        return self._tenant

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the `x-ratelimit-*` headers of the tenant's quotas."""
        return headers_of(self._left.left)

    async def written(self) -> None:
        """Return when the request is written down. Raises Unavailable."""
        if self._writing is not None:
            await self._gate.until_written(self._writing)
            self._writing = None

    def forwarded(self, replica: Replica) -> None:
        """Note the deployment that will report the request."""
        if self._noted is not None:
            self._gate.note_forward(self._noted, replica)

    def used(self, usage: AnsweredUsage) -> None:
        """Count the usage that the answer of a deployment elsewhere names."""
        if self._noted is not None and not self._is_closed:
            self._gate.note_usage(self._noted, usage)

    def close(self, status: int) -> None:
        """End the request, and let the next one run. Further calls do nothing."""
        if self._is_closed or self._noted is None:
            return
        self._is_closed = True
        self._gate.note_close(self._noted, status, self._lane)


class TenantGate:
    """The gate. folder: of the stores. socket_of: admin socket of a deployment. clock: seconds since the epoch."""

    def __init__(
        self,
        serve: ServeFile,
        folder: Path,
        *,
        socket_of: Callable[[str], Path] = admin_socket_of,
        clock: Callable[[], float] = time.time,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._socket_of = socket_of
        self._most_waiting = most_waiting
        self._directory = self._read(serve)
        self._lanes: dict[str, Lane] = {}
        self._replicas: dict[str, set[str]] = {}  # deployments of a model that requests were forwarded to
        self._presence: Presence | None = None
        self._writer: Writer | None = None
        self._booker: Booker | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def takes_keys(self) -> bool:
        return self._directory.has_tenants

    async def start(self) -> None:
        """Open the stores, close the requests of dead gateways, and follow the deployments that report them."""
        connection = await asyncio.to_thread(opened, self._folder)
        self._writer = Writer(connection)
        self._presence = await asyncio.to_thread(Presence, self._folder)
        self._booker = Booker(self._writer, self._clock, socket_of=self._socket_of, on_change=self._let_wait_run)
        await self.sweep()
        self._sweeper = asyncio.create_task(self._sweep_on(), name="usage sweep")

    async def close(self) -> None:
        """Book what deployments have reported until now, and close the stores."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        if self._booker is not None:
            await self._booker.catch_up(LAST_REPORTS_S)
            await self._booker.close()
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)
        if self._presence is not None:
            self._presence.close()
        self._sweeper = self._booker = self._writer = self._presence = None

    async def apply(self, serve: ServeFile) -> None:
        """Take over changed tenants; admitted requests are not disturbed. Raises ConfigError for a file of keys."""
        self._directory = await asyncio.to_thread(self._read, serve)

    def models_of(self, key: str | None, models: Sequence[str]) -> Sequence[str]:
        """Return those of the models that a key may see. Raises InvalidKey."""
        return self._directory.visible(self._directory.caller(key), models)

    async def standings(self) -> Sequence[TenantStanding]:
        """Return the use of each tenant beside its quotas, by name. Raises ConfigError."""
        tenants = dict(self._directory.tenants)
        try:
            return await asyncio.to_thread(read_standings, self._folder, tenants, self._clock())
        except sqlite3.Error as error:
            raise ConfigError("the usage file cannot be read", str(error)) from error

    async def admit(self, facts: RequestFacts) -> TenantPermit:
        """Return when the request may run. Raises InvalidKey, NotFound, Overloaded, Unavailable.

        A request that no quota may refuse does not wait for the store: it is forwarded while it is written down.
        """
        caller = self._directory.caller(facts.key)
        if not self._directory.visible(caller, (facts.model,)):
            raise NotFound(f"the model {facts.model[:80]!r} does not exist", code="model_not_found", field="model")
        terms, writer = caller.terms, self._open()
        if not facts.is_generation:
            counted = partial(quotas.reserve, terms=terms, now=self._clock())
            left = await self.until_written(writer.post(counted)) if terms.is_limited else UNLIMITED
            return TenantPermit(self, terms.name, left=left)
        tokens = float(EXPECTED_TOKENS if facts.max_output_tokens is None else max(0, facts.max_output_tokens))
        entry = Entry(
            request=facts.request_id,
            gateway=self._named(),
            terms=terms,
            key=caller.key,
            model=facts.model,
            route=facts.route,
            tokens=tokens,
            audio_s=EXPECTED_AUDIO_S if facts.route.startswith(SOUND) else None,
        )
        noted, reserved = Noted(), UNLIMITED
        writing = writer.post(partial(_write_down, noted=noted, entry=entry, now=self._clock()))
        if terms.is_limited:
            try:
                reserved = await self.until_written(writing)
            except Overloaded:
                writer.post(partial(books.refuse, entry=entry, now=self._clock()))
                raise
            except asyncio.CancelledError:
                writer.post(_of(noted, books.undo))
                raise
        lane = None if facts.route.startswith(SESSIONS) else self._lane(facts.model)
        if lane is not None:
            try:
                await lane.enter(terms.name, terms.weight, min(MOST_WORK, max(1.0, tokens)))
            except BaseException as error:
                writer.post(_of(noted, books.undo))
                if isinstance(error, Overloaded):
                    writer.post(partial(books.refuse, entry=entry, now=self._clock()))
                raise
        return TenantPermit(self, terms.name, noted, writing=writing, left=reserved, lane=lane)

    async def sweep(self) -> None:
        """Do what is due: free what dead gateways hold, and settle late requests. Called every second."""
        assert self._presence is not None and self._booker is not None
        writer, now = self._open(), self._clock()
        living = await asyncio.to_thread(self._presence.living)
        await writer.call(partial(books.close_lost, living=living, now=now))
        await self._booker.sweep()
        for model in [model for model, lane in self._lanes.items() if lane.is_empty]:
            del self._lanes[model]

    def note_forward(self, noted: Noted, replica: Replica) -> None:
        """Note the deployment of a request, and follow its reports. Called by its permit."""
        # A deployment elsewhere is named by its address: one of this host may have the same name.
        place = replica.deployment if replica.is_local else replica.url
        self._open().post(_of(noted, partial(books.forward, deployment=place)))
        self._replicas.setdefault(replica.model, set()).add(replica.deployment)
        if replica.is_local and self._booker is not None:
            self._booker.follow(replica.deployment)

    def note_usage(self, noted: Noted, usage: AnsweredUsage) -> None:
        """Book what an answer says. Called by its permit."""
        if self._writer is not None:
            figures = Figures(**asdict(usage))
            self._writer.post(_of(noted, partial(books.book_answer, figures=figures)))

    def note_close(self, noted: Noted, status: int, lane: Lane | None) -> None:
        """Note the end of a request. Called by its permit, once."""
        if self._writer is not None:  # else the next gateway closes it
            self._writer.post(_of(noted, partial(books.close, status=status, now=self._clock())))
        if lane is not None:
            lane.leave()

    def waiting(self, model: str) -> int:
        """Return how many requests wait for a model in this gateway."""
        lane = self._lanes.get(model)
        return 0 if lane is None else lane.waiting

    def capacity(self, model: str) -> int | None:
        """Return how many requests of a model may be at its replicas, None until they have reported their slots."""
        watched = {} if self._booker is None else self._booker.watched
        known = [watched[name].slots for name in self._replicas.get(model, ()) if name in watched]
        return sum(slots + max(1, slots // SPARE) for slots in known) if known and all(known) else None

    # -- internal -----------------------------------------------------------------------------------------------------

    async def until_written(self, written: Future[T]) -> T:
        """Wait for an operation of the store, which a cancelled caller does not stop. Raises Unavailable."""
        result: asyncio.Future[T] | None = None
        try:
            if written.done():  # no further turn of the loop
                return written.result()
            result = asyncio.wrap_future(written)
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            if result is not None:
                result.add_done_callback(lambda done: done.cancelled() or done.exception())  # no caller reads it
            raise
        except (sqlite3.Error, OSError) as error:
            log.error("the usage file cannot be written", extra={"facts": {"why": str(error)}})
            hint = "check the free space of the gateway's state folder"
            raise Unavailable("the gateway cannot count requests", str(error), hint, retry_after_s=5) from error

    def _lane(self, model: str) -> Lane:
        lane = self._lanes.get(model)
        if lane is None:
            lane = self._lanes[model] = Lane(model, partial(self.capacity, model), self._most_waiting)
        return lane

    def _let_wait_run(self) -> None:
        for lane in self._lanes.values():
            lane.admit()

    async def _sweep_on(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except Exception:  # isolation boundary: the next sweep may succeed
                log.exception("usage cannot be settled")

    def _read(self, serve: ServeFile) -> Directory:
        declared = [
            Terms(
                name=spec.name,
                models=spec.models,
                requests_per_minute=spec.requests_per_minute,
                tokens_per_day=spec.tokens_per_day,
                audio_seconds_per_day=spec.audio_seconds_per_day,
                concurrency=spec.concurrency,
                weight=spec.weight,
            )
            for spec in serve.tenants.values()
        ]
        reserved = {entry.name: entry.tenants for entry in serve.models.values() if entry.tenants}
        keys = [
            (spec.name, key)
            for spec in serve.tenants.values()
            if spec.key_file is not None
            for key in read_keys(spec.key_file, f"tenants.{spec.name}.key_file")
        ]
        file = TenantFile(self._folder)
        return Directory(file, declared, reserved, keys=keys, needs_key=serve.require_key, clock=self._clock)

    def _open(self) -> Writer:
        if self._writer is None:
            raise Unavailable("the gateway is stopping", hint="send the request again", retry_after_s=1)
        return self._writer

    def _named(self) -> str:
        assert self._presence is not None
        return self._presence.name


def _write_down(db: sqlite3.Connection, noted: Noted, entry: Entry, now: float) -> Reserved:
    """Reserve the quotas of a request and write it down. Raises Overloaded."""
    noted.number = None  # an earlier attempt may have been rolled back
    noted.number, reserved = books.admit(db, entry, now)
    return reserved


def _of(noted: Noted, operation: Callable[..., object]) -> Operation[None]:
    """Return an operation on a request's entry, which is queued behind the one that writes it down.

    It does nothing for a request that was refused, or could not be written.
    """

    def on_entry(db: sqlite3.Connection) -> None:
        if noted.number is not None:
            operation(db, number=noted.number)

    return on_entry
