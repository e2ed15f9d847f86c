"""HTTP handler of the gateway: finds the model of a request, waits for it, and joins client and replica."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from mstar_core.errors import MstarError, NotFound, Unavailable
from mstar_core.gateway.door import headers as head
from mstar_core.gateway.door.affinity import Affinity, IdOwner, in_order
from mstar_core.gateway.door.answer_usage import SessionUsage, UsageReader
from mstar_core.gateway.door.ask import Ask, HeldBytes
from mstar_core.gateway.door.load import Loads
from mstar_core.gateway.door.own.cards import AWAKE, Cards
from mstar_core.gateway.door.own.counters import Counters
from mstar_core.gateway.door.own.pages import COOKIE, chosen
from mstar_core.gateway.door.own.routes import OwnRoutes
from mstar_core.gateway.door.paths import (
    EVENT_ROUTES,
    LISTS,
    MADE,
    MAKERS,
    VOICES,
    PathParts,
    is_unguessable,
    made_ids,
    parts_of,
    voice_key,
)
from mstar_core.gateway.door.replies import JSON, check_method, error_reply, event, internal, no_model, unknown_model
from mstar_core.gateway.door.sockets import join
from mstar_core.gateway.door.upstream import Upstream, abort, answer_of, open_session, read_some, relay
from mstar_core.gateway.door.waiting import Comments
from mstar_core.gateway.parts import Fleet, Gate, Permit, Replica, RequestFacts
from mstar_core.gateway.serve_file import ServeFile

LEFT: int = 499
"""Status of a request whose client has gone."""

ERROR_BYTES = 64 << 10
EVENTS = "text/event-stream"

log = logging.getLogger("mstar.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The goal of a request. sticky: deployment that holds its state. key: of the tenant that it belongs to.

    owner: the tenant that made the id which the request names, None if it names none.
    """

    model: str
    sticky: str | None = None
    key: str | None = None
    owner: str | None = None


@dataclass(slots=True)
class Door:
    """The HTTP side of the gateway. Owned by its main: `start`, then `handle` for each request, then `close`.

    in_flight: requests that run. is_draining: /ready says no, and connections close after their request.
    """

    fleet: Fleet
    gate: Gate
    serve: ServeFile
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    affinity: Affinity = field(default_factory=Affinity)
    held: HeldBytes = field(default_factory=HeldBytes)
    comment_s: tuple[float, float] = (1.0, 2.0)
    in_flight: int = 0
    is_draining: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    session: aiohttp.ClientSession = field(init=False)
    cards: Cards = field(init=False)
    loads: Loads = field(init=False)
    _upstream: Upstream = field(init=False)
    _own: OwnRoutes = field(init=False)
    _poll: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the client side."""
        self.session = open_session()
        self.cards = Cards(self.session, self.clock)
        self.loads = Loads(self.session)
        self._upstream = Upstream(session=self.session, gate=self.gate)
        self._own = OwnRoutes(self.fleet, self.gate, self.cards, self.counters, self.session, self.serve)
        self._poll = asyncio.create_task(self.loads.follow(self.fleet), name="replica loads")
        self.idle.set()

    async def close(self) -> None:
        """Close the connections to deployments, and the file of ids."""
        if self._poll is not None:
            self._poll.cancel()
            await asyncio.gather(self._poll, return_exceptions=True)
        await self.session.close()
        if self.affinity.kept is not None:
            await self.affinity.kept.close()

    def take(self, serve: ServeFile) -> None:
        """Take over changed limits."""
        self.serve = self._own.serve = serve

    async def metrics_text(self) -> bytes:
        """Return the metrics of the gateway and its deployments."""
        return await self._own.metrics_text()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Errors become the responses of a deployment's api; the loop is never blocked."""
        self.in_flight += 1
        self.idle.clear()
        request_id = head.request_id_of(request.headers)
        parts = parts_of(request.raw_path)
        try:
            check_method(request.method)
            answer = await self._answer(request, parts, request_id)
        except MstarError as error:
            answer = error_reply(error, request_id, is_native=parts.is_native)
        except (ConnectionError, aiohttp.ClientConnectionResetError):
            raise  # the client has gone
        except Exception:
            log.exception("a request failed", extra={"facts": {"request": request_id}})
            answer = error_reply(internal(request_id), request_id, is_native=parts.is_native)
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()
        if self.is_draining:
            answer.force_close()
        return answer

    async def _answer(self, request: web.BaseRequest, parts: PathParts, request_id: str) -> web.StreamResponse:
        key, peer = head.key_of(request.headers), head.peer_of(request.transport)
        own = await self._own.answer(request, parts, key, peer, is_draining=self.is_draining)
        if own is not None:
            return own
        ask = Ask(
            request=request,
            parts=parts,
            request_id=request_id,
            key=key,
            peer=peer,
            arrived=self.clock(),
            limit=self.serve.max_body_bytes,
        )
        try:
            return await self._forward(ask)
        finally:
            ask.release(self.held)

    # -- the model of a request ----------------------------------------------------------------------------------------

    def _names(self, key: str | None) -> list[str]:
        return list(self.gate.models_of(key, self.fleet.names()))

    def _named(self, ask: Ask) -> str | None:
        """Return the name that a request gives its model outside of its body."""
        request = ask.request
        return ask.parts.model or request.headers.get(head.MODEL) or request.query.get("model")

    async def _target(self, ask: Ask) -> Target:
        """Return the model of a request, and the deployment that holds what it builds on.

        Raises NotFound for an unknown model with the nearest names, RequestError if it names none of several.
        """
        owner = self._owner(ask)
        name = self._named(ask) or ask.facts.model
        key = owner.key if owner is not None and is_secret(ask.key) else ask.key
        tenant = None if owner is None else owner.tenant
        if name is None:
            if owner is not None and self._is_served(owner):
                return Target(model=owner.model, sticky=owner.deployment, key=key, owner=tenant)
            return Target(model=await self._default(ask, key), key=key, owner=tenant)
        model, names = await self._resolve(name), self._names(key)
        if model is None or model not in names:
            raise unknown_model(name, names)
        sticky = owner.deployment if owner is not None and owner.model == model else None
        return Target(model=model, sticky=sticky, key=key, owner=tenant)

    def _owner(self, ask: Ask) -> IdOwner | None:
        """Return who made the id that a request builds on."""
        facts, key = ask.facts, ask.key
        if key is not None and is_secret(key):
            return self.affinity.owner(key)
        if facts.session_id is not None:
            return self.affinity.owner(session_key(key, facts.session_id))
        if ask.parts.path.startswith("/v1/sessions/"):
            return self.affinity.owner(session_key(key, ask.parts.id))
        owner = next(
            (
                found
                for name in (ask.parts.id, facts.previous_response_id)
                if name and (found := self.affinity.owner(name))
            ),
            None,
        )
        voice = ask.parts.id if ask.parts.path.startswith(f"{VOICES}/") else facts.voice
        return owner if owner is not None or not voice else self.affinity.owner(voice_key(key, voice))

    def _is_served(self, owner: IdOwner) -> bool:
        """Return whether the model of an id is still served under its name."""
        return self.fleet.resolve(owner.model) == owner.model

    def _is_searched(self, owner: IdOwner | None) -> bool:
        """Return whether an id is looked for at all replicas. One of a tenant whose model is gone is not."""
        return owner is None or not self.gate.takes_keys and not self._is_served(owner)

    async def _resolve(self, name: str) -> str | None:
        """Return the model of a name: of the fleet, or of a deployment's cards, which list adapters too."""
        model = self.fleet.resolve(name) or self.cards.resolve(name)
        if model is None:
            statuses = self.fleet.models()
            await self.cards.refresh(statuses)
            takes_any = [status.name for status in statuses if "*" in status.aliases]
            model = self.cards.resolve(name) or (takes_any[0] if len(takes_any) == 1 else None)
        return model

    async def _default(self, ask: Ask, key: str | None) -> str:
        """Return the model of a request that names none: of the page that sent it, or the only one for its route."""
        names = self._names(key)
        page = chosen(ask.request.cookies.get(COOKIE))
        if page in names and page is not None:
            return page
        if ask.request.method == "OPTIONS" and names:
            return names[0]  # a browser asks before a request whose body names the model
        modality = MADE.get(ask.parts.path)
        if len(names) > 1 and modality is not None:
            await self.cards.refresh(self.fleet.models())
            makers = [name for name in self.cards.makers(modality) if name in names]
            names = makers if len(makers) == 1 else names
        if len(names) != 1:
            raise no_model(names)
        return names[0]

    # -- forwarding ----------------------------------------------------------------------------------------------------

    async def _forward(self, ask: Ask) -> web.StreamResponse:
        is_named = self._named(ask) is not None
        if not ask.is_upgrade:
            await ask.look(self.held, needs_model=not is_named and len(self.fleet.names()) > 1)
        if ask.parts.id and not is_named and self._is_searched(self._owner(ask)):
            found = await self._searched(ask)
            if found is not None:
                return found
        target = await self._target(ask)
        facts = RequestFacts(
            model=target.model,
            route=ask.parts.path,
            request_id=ask.facts.request_id or ask.request_id,
            key=target.key,
            max_output_tokens=ask.facts.max_output_tokens,
            is_generation=ask.is_generation,
        )
        permit = await self.gate.admit(facts)
        ask.tenant = permit.tenant
        status = LEFT
        try:
            if self.gate.takes_keys and target.owner not in (None, permit.tenant):
                raise NotFound("it does not exist", hint="ids belong to the tenant that made them")
            answer = await self._admitted(ask, target, permit)
            status = answer.status
            return answer
        except MstarError as error:
            status = error.status
            raise
        finally:
            permit.close(status)
            self.counters.requests.labels(target.model, ask.parts.label, str(status)).inc()

    async def _admitted(self, ask: Ask, target: Target, permit: Permit) -> web.StreamResponse:
        comments = Comments(
            ask.request,
            {head.REQUEST_ID: ask.request_id, **permit.headers},
            is_possible=ask.facts.is_streamed and ask.parts.path in EVENT_ROUTES,
            first_s=self.comment_s[0],
            repeat_s=self.comment_s[1],
        )
        try:
            replicas = await self.fleet.ready(target.model, comments.note)
            waited_s = self.clock() - ask.arrived
            self.counters.waited_s.labels(target.model).observe(waited_s)
            begun = await comments.stop()
            return await self._send(ask, target, permit, replicas, begun, waited_s)
        except MstarError as error:
            begun = await comments.stop()
            if begun is None:
                raise
            await begun.write(event(error))
            await begun.write_eof()
            return begun
        finally:
            await comments.stop()

    async def _send(
        self,
        ask: Ask,
        target: Target,
        permit: Permit,
        replicas: Sequence[Replica],
        begun: web.StreamResponse | None,
        waited_s: float,
    ) -> web.StreamResponse:
        """Send a request to the best replica. begun: the stream of comments, if it has begun."""
        prompt = ask.facts.prompt if len(replicas) > 1 else b""
        preferred = self.affinity.with_prefix(target.model, prompt) if prompt else None
        ordered = in_order(replicas, self.loads.of(replicas), target.sticky, preferred)
        with ReplicaUse(self, permit) as use:
            if ask.is_upgrade:
                await permit.written()
                return await join(self.session, ask, ordered, use.of, use.heard, takes_keys=self.gate.takes_keys)
            left_s = self.clock()
            replica, response = await self._upstream.begin(ask, ordered, use.of, self.counters.retries.inc)
            answered_s = self.clock()
            reader = None if replica.is_local else UsageReader(response.content_type == EVENTS)
            try:
                await permit.written()
                if prompt:
                    self.affinity.note_prefix(target.model, prompt, replica.deployment)
                self._note_session(ask, replica, permit.tenant)
                before_s = left_s - ask.arrived - waited_s

                def first(piece: bytes) -> None:
                    self.counters.added_s.observe(before_s + self.clock() - answered_s)
                    self._learn(ask, replica, response, piece, permit.tenant)

                return await self._answered(ask, permit, response, begun, first, reader)
            finally:
                if reader is not None and (used := reader.usage()) is not None:
                    permit.used(used)
                response.close() if not response.content.at_eof() else response.release()

    async def _answered(
        self,
        ask: Ask,
        permit: Permit,
        response: aiohttp.ClientResponse,
        begun: web.StreamResponse | None,
        first: Callable[[bytes], None],
        reader: UsageReader | None,
    ) -> web.StreamResponse:
        if begun is not None and response.status >= 400:
            body = await read_some(response, ERROR_BYTES)
            await begun.write(b"data: " + b" ".join(body.split()) + b"\n\n")
            await begun.write_eof()
            return begun
        if self.gate.takes_keys and ask.request.method == "GET" and ask.parts.path in LISTS:
            return await self._own_items(ask, permit, response)
        answer = begun
        if answer is None:
            answer = answer_of(response)
            answer.headers.update(permit.headers)
            await answer.prepare(ask.request)
        try:
            self.counters.pieces.inc(await relay(response, answer, first, None if reader is None else reader.feed))
            await answer.write_eof()
        except aiohttp.ClientConnectionResetError:
            raise  # the client has gone
        except aiohttp.ClientError as error:
            self.counters.broken.inc()
            log.warning("a deployment ended an answer early: %s", error, extra={"facts": {"request": ask.request_id}})
            abort(ask.request)
        return answer

    async def _own_items(self, ask: Ask, permit: Permit, response: aiohttp.ClientResponse) -> web.StreamResponse:
        """Return a list without the items of other tenants, which share the deployment's key."""
        body = await response.read()
        if response.status == 200:
            listed = msgspec.json.decode(body)
            listed["data"] = [item for item in listed.get("data", []) if self._is_own(ask, item, permit.tenant)]
            body = msgspec.json.encode(listed)
        headers = {"Content-Type": response.headers.get("Content-Type", JSON), head.REQUEST_ID: ask.request_id}
        return web.Response(body=body, status=response.status, headers={**headers, **permit.headers})

    def _is_own(self, ask: Ask, item: dict[str, Any], tenant: str) -> bool:
        name = str(item.get("id"))
        if ask.parts.path == VOICES:
            return item.get("kind") == "preset" or self.affinity.owner(voice_key(ask.key, name)) is not None
        owner = self.affinity.owner(name)
        return owner is not None and owner.tenant == tenant

    async def _searched(self, ask: Ask) -> web.StreamResponse | None:
        """Ask the awake replicas one by one for an id that this gateway does not know, None if none has it.

        Another gateway may have forwarded the request that made it.
        """
        if not ask.is_replayable or self.gate.takes_keys and not is_unguessable(ask.parts.id):
            return None
        names = set(self._names(ask.key))
        awake = [each for each in self.fleet.models() if each.name in names and each.state in AWAKE]
        replicas = [replica for status in awake for replica in status.replicas]
        if len(replicas) < 2:
            return None
        for replica in replicas:
            with suppress(Unavailable):
                _, response = await self._upstream.begin(ask, [replica], lambda _: None, lambda: None)
                if response.status in (404, 503):
                    response.release()
                    continue
                if not self.gate.takes_keys:  # its tenant is not known
                    self.affinity.note([ask.parts.id], IdOwner(replica.model, replica.deployment, ask.key))
                answer = answer_of(response)
                try:
                    await answer.prepare(ask.request)
                    await relay(response, answer, lambda _: None)
                    await answer.write_eof()
                finally:
                    response.close() if not response.content.at_eof() else response.release()
                return answer
        raise NotFound(f"{ask.parts.id[:80]!r} does not exist", hint="no replica that is awake has it")

    def _note_session(self, ask: Ask, replica: Replica, tenant: str) -> None:
        if ask.facts.session_id is not None:
            name = session_key(ask.key, ask.facts.session_id)
            self.affinity.note([name], IdOwner(replica.model, replica.deployment, ask.key, tenant))

    def _learn(self, ask: Ask, replica: Replica, response: aiohttp.ClientResponse, piece: bytes, tenant: str) -> None:
        """Remember the ids that an answer makes."""
        if ask.request.method != "POST" or response.status >= 400:
            return
        owner = IdOwner(replica.model, replica.deployment, ask.key, tenant)
        if ask.parts.path in MAKERS:
            self.affinity.note(made_ids(ask.parts.path, piece, response.headers.get("Location", ""), ask.key), owner)
        self.affinity.note([ask.facts.request_id or ask.request_id], owner, is_kept=False)


def is_secret(key: str | None) -> bool:
    """Return whether a key is a client secret, which stands for the key that made it."""
    return key is not None and key.startswith(head.SECRET)


def session_key(key: str | None, session_id: str) -> str:
    """Return the name under which the replica of a session is remembered. Sessions belong to a key."""
    return f"session {key or ''} {session_id}"


class ReplicaUse:
    """Use of replicas by one request: holds the current one awake and counts it. A context manager."""

    def __init__(self, door: Door, permit: Permit) -> None:
        self._door = door
        self._permit = permit
        self._replica: Replica | None = None
        self._events = SessionUsage()
        self._held: Any = None

    def of(self, replica: Replica) -> None:
        """Turn to a replica; the one before is given back."""
        self._leave()
        self._held = self._door.fleet.using(replica)
        self._held.__enter__()
        self._replica = replica
        self._door.loads.own[replica.deployment] += 1
        self._permit.forwarded(replica)

    def heard(self, event: str) -> None:
        """Count the usage that an event of a deployment elsewhere names."""
        if self._replica is not None and not self._replica.is_local and self._events.feed(event):
            self._permit.used(self._events.total)

    def __enter__(self) -> ReplicaUse:
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._replica is not None:
            self._door.loads.own[self._replica.deployment] -= 1
            self._held.__exit__(None, None, None)
            self._replica = None
