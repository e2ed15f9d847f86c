"""Routes that the gateway answers itself: merged lists, metrics, health, pages. Used by the door."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from mstar_core.errors import Refused
from mstar_core.gateway.door.headers import FORWARDED, is_loopback
from mstar_core.gateway.door.own import pages
from mstar_core.gateway.door.own.cards import AWAKE, Cards, fetch, fetch_json
from mstar_core.gateway.door.own.counters import CONTENT_TYPE, Counters
from mstar_core.gateway.door.own.description import merged
from mstar_core.gateway.door.paths import PathParts
from mstar_core.gateway.door.replies import json_reply, unknown_model
from mstar_core.gateway.parts import Fleet, Gate, ModelState, ModelStatus
from mstar_core.gateway.serve_file import ServeFile
from mstar_core.version import __version__

SERVES = (*AWAKE, ModelState.SLEEPING)
MODELS = "/v1/models"


@dataclass(slots=True)
class OwnRoutes:
    """The gateway's own routes. Owned by the door."""

    fleet: Fleet
    gate: Gate
    cards: Cards
    counters: Counters
    session: aiohttp.ClientSession
    serve: ServeFile

    async def answer(
        self, request: web.BaseRequest, parts: PathParts, key: str | None, peer: str, *, is_draining: bool
    ) -> web.StreamResponse | None:
        """Return the answer of a route of the gateway, None for a request that is forwarded."""
        is_socket = request.headers.get("Upgrade", "").lower() == "websocket"  # others, such as h2c, are optional
        if request.method not in ("GET", "HEAD") or is_socket:
            return None
        if parts.model is not None:
            return self._page_of(parts, parts.model) if parts.path == "/" else None
        match parts.path:
            case "/":
                return pages.index(self._shown(key)) if self.serve.console else None
            case "/health":
                return self._health(is_draining=is_draining)
            case "/ready":
                return self._ready(is_draining=is_draining)
            case "/version":
                return json_reply({"version": __version__, "api": 1, "gateway": True})
            case "/metrics":
                return await self._metrics(request, key, peer)
            case "/openapi.json":
                return await self._description(key)
            case "/docs":
                return pages.asset("docs.html")
            case "/console/deployments":
                return json_reply(
                    {
                        "deployments": [
                            {"name": each.name, "path": f"/m/{each.name}/", "model": each.state}
                            for each in self._shown(key)
                        ]
                    }
                )
            case "/v1/models":
                return await self._models(request, key)
        if parts.path.startswith("/assets/"):
            return pages.asset(parts.path.removeprefix("/assets/"))
        if parts.path.startswith(f"{MODELS}/"):
            return await self._model(parts.path.removeprefix(f"{MODELS}/"), key)
        return None

    def _visible(self, key: str | None) -> list[ModelStatus]:
        """Return the models that a key may see. Raises Refused for an unknown key."""
        statuses = self.fleet.models()
        names = set(self.gate.models_of(key, [status.name for status in statuses]))
        return [status for status in statuses if status.name in names]

    def _shown(self, key: str | None) -> Sequence[ModelStatus]:
        """Return the models of the page, which a browser opens without a key."""
        try:
            return self._visible(key)
        except Refused:
            return ()

    def _page_of(self, parts: PathParts, name: str) -> web.StreamResponse | None:
        model = self.fleet.resolve(name)
        if model is None or not self.serve.console:
            return None
        return pages.model_page(model)

    def _health(self, *, is_draining: bool) -> web.Response:
        states = {status.name: str(status.state) for status in self.fleet.models()} if not self.gate.takes_keys else {}
        return json_reply({"status": "draining" if is_draining else "healthy", "models": states})

    def _ready(self, *, is_draining: bool) -> web.Response:
        statuses = self.fleet.models()
        can_serve = any(s.state in SERVES or s.state is ModelState.ABSENT and not s.replicas for s in statuses)
        if can_serve and not is_draining:
            return json_reply({"status": "ready"})
        reason = "draining" if is_draining else "no_model"
        return json_reply({"status": "unavailable", "reason": reason}, 503, {"Retry-After": "2"})

    async def _models(self, request: web.BaseRequest, key: str | None) -> web.Response:
        statuses = self._visible(key)
        await self.cards.refresh(statuses)
        cards = self.cards.listed(statuses, await self._locked(statuses, key))
        page = pages.chosen(request.cookies.get(pages.COOKIE))
        if page is not None:  # the page shows the first one
            cards.sort(key=lambda card: page not in (card["id"], card.get("parent")))
        return json_reply({"object": "list", "data": cards})

    async def _model(self, name: str, key: str | None) -> web.Response:
        statuses = self._visible(key)
        await self.cards.refresh(statuses)
        listed = self.cards.listed(statuses, await self._locked(statuses, key))
        card = next((card for card in listed if card["id"] == name), None)
        model = self.fleet.resolve(name) or self.cards.resolve(name)
        card = card or next((card for card in listed if card["id"] == model), None)
        if card is None:
            raise unknown_model(name, [status.name for status in statuses])
        return json_reply(card)

    async def _locked(self, statuses: Sequence[ModelStatus], key: str | None) -> set[str]:
        """Return the models whose deployments refuse the key of a client. With tenants the gateway has checked it."""
        if self.gate.takes_keys:
            return set()
        keyed = [status for status in statuses if status.replicas and status.replicas[0].key is not None]
        answers = await asyncio.gather(
            *(fetch(self.session, status.replicas[0], MODELS, key or "") for status in keyed)
        )
        return {status.name for status, answer in zip(keyed, answers, strict=True) if answer is None}

    async def _metrics(self, request: web.BaseRequest, key: str | None, peer: str) -> web.Response:
        """Return all metrics. With tenants they are for this host alone, because they show the load of all."""
        if self.gate.takes_keys and (not is_loopback(peer) or FORWARDED in request.headers):
            raise Refused("metrics are served to this host only", hint="mstarctl metrics NAME, or a collector here")
        text = await self.metrics_text(None if self.gate.takes_keys else key or "")
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE, "Server": "mstar"})

    async def metrics_text(self, key: str | None = None) -> bytes:
        """Return the metrics of the gateway and of the deployments that answer. key: instead of their own."""
        statuses = self.fleet.models()
        replicas = [each for status in statuses if status.state in AWAKE for each in status.replicas]
        texts = await asyncio.gather(*(fetch(self.session, replica, "/metrics", key) for replica in replicas))
        others = [
            ({"deployment": replica.deployment, "model": replica.model}, text.decode("utf-8", "replace"))
            for replica, text in zip(replicas, texts, strict=True)
            if text is not None
        ]
        return self.counters.text(statuses, others).encode()

    async def _description(self, key: str | None) -> web.Response:
        awake = [status for status in self._visible(key) if status.state in AWAKE and status.replicas]
        sent = None if self.gate.takes_keys else key or ""
        documents = await asyncio.gather(
            *(fetch_json(self.session, status.replicas[0], "/openapi.json", sent) for status in awake)
        )
        named = ((status.name, document) for status, document in zip(awake, documents, strict=True))
        return json_reply(merged((name, document) for name, document in named if isinstance(document, dict)))
