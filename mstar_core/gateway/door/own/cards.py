"""Model cards of deployments, as their `/v1/models` returns them: for the merged list and for further names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import msgspec

from mstar_core.gateway.parts import ModelState, ModelStatus, Replica

FRESH_S: Final = 10.0
ANSWER: Final = aiohttp.ClientTimeout(total=3.0)
AWAKE: Final = (ModelState.READY, ModelState.IDLE)

Card = dict[str, Any]


@dataclass(slots=True)
class Cards:
    """Cards by model. Owned by the door. A model keeps its cards while it sleeps."""

    session: aiohttp.ClientSession
    clock: Callable[[], float] = time.monotonic
    known: dict[str, list[Card]] = field(default_factory=dict)
    _read: dict[str, float] = field(default_factory=dict)

    async def refresh(self, statuses: Sequence[ModelStatus]) -> None:
        """Read the cards of models that are awake and whose cards are not fresh."""
        now = self.clock()
        stale = [
            status
            for status in statuses
            if status.state in AWAKE and status.replicas and now - self._read.get(status.name, -FRESH_S) >= FRESH_S
        ]
        answers = await asyncio.gather(*(fetch_json(self.session, each.replicas[0], "/v1/models") for each in stale))
        for status, answer in zip(stale, answers, strict=True):
            self._read[status.name] = now
            cards = answer.get("data") if isinstance(answer, dict) else None
            if isinstance(cards, list) and cards:
                self.known[status.name] = [card for card in cards if isinstance(card, dict)]
        names = {status.name for status in statuses}
        self.known = {name: cards for name, cards in self.known.items() if name in names}

    def resolve(self, name: str) -> str | None:
        """Return the model of which a card has this id or alias."""
        return next((model for model, cards in self.known.items() if name in _names(cards)), None)

    def makers(self, modality: str) -> list[str]:
        """Return the models whose cards have this output modality."""
        return [
            model
            for model, cards in self.known.items()
            if any(modality in card.get("output_modalities", ()) for card in cards)
        ]

    def listed(self, statuses: Iterable[ModelStatus], locked: Collection[str] = ()) -> list[Card]:
        """Return the cards of models with their states; of a model that was never loaded the name alone.

        locked: models whose cards the client may not see, because their deployments refuse its key.
        """
        return [card for status in statuses for card in self._cards(status, is_locked=status.name in locked)]

    def _cards(self, status: ModelStatus, *, is_locked: bool) -> Iterator[Card]:
        facts = {
            "state": str(status.state),
            "replicas": len(status.replicas),
            "running": status.running,
            "queued": status.queued,
            **({"reason": status.reason} if status.reason else {}),
        }
        known = (None if is_locked else self.known.get(status.name)) or [
            {"object": "model", "created": 0, "owned_by": "mstar"}
        ]
        own = known[0].get("id", status.name)
        for number, card in enumerate(known):
            names = dict.fromkeys([*status.aliases, *card.get("aliases", []), own]) if not number else {}
            named = {"id": card.get("id"), "parent": status.name} if number else {"id": status.name}
            aliases = [name for name in names if name not in ("*", status.name)]
            yield {**card, **named, "aliases": aliases, **facts}


def _names(cards: Sequence[Card]) -> Iterator[str]:
    for card in cards:
        yield str(card.get("id"))
        yield from map(str, card.get("aliases", []))


async def fetch(session: aiohttp.ClientSession, replica: Replica, path: str, key: str | None = None) -> bytes | None:
    """Return what a deployment answers at a path, None if it does not answer 200 in time. key: instead of its own."""
    sent = replica.key if key is None else key
    headers = {"Authorization": f"Bearer {sent}"} if sent else {}
    try:
        async with session.get(
            f"{replica.url}{path}", headers=headers, timeout=ANSWER, ssl=not replica.is_local
        ) as response:
            body: bytes = await response.read()
            return body if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


async def fetch_json(session: aiohttp.ClientSession, replica: Replica, path: str, key: str | None = None) -> Any:
    """Return the JSON at a path of a deployment, None if it does not answer 200 in time."""
    body = await fetch(session, replica, path, key)
    try:
        return None if body is None else msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
