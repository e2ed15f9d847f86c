"""Runs of one request with strikes, compared with the undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bench.soak.answers import Answer, ask, flaws
from tests.runtime.client import new_client
from tests.runtime.deployment import END_S, until
from tests.survival.mortal import Mortal
from tests.survival.points import FOLLOWER, WORKER
from tests.survival.strikes import Sent, Strike

DIED: Final = "child.died"
GROUP: Final = {WORKER, FOLLOWER}
STRIKE_S: Final = 60.0
"""Longest time from an answer to a strike of its request."""


@dataclass(slots=True)
class Judge:
    """Undisturbed answers of one deployment, to which those with strikes are compared."""

    deployment: Mortal
    bodies: Mapping[str, Mapping[str, Any]]
    references: dict[str, Answer] = field(default_factory=dict)

    async def undisturbed(self, name: str) -> Answer:
        """Return the answer to a request without strikes."""
        if name not in self.references:
            await asyncio.to_thread(self.settle)
            answer = await self._ask(name)
            assert answer.is_whole, (answer.body, answer.code, answer.cause)
            self.references[name] = answer
        return self.references[name]

    async def messages(self, name: str) -> list[Sent]:
        """Return the messages that processes send for a request, in order for each sender."""
        await self.undisturbed(name)
        await asyncio.to_thread(self.deployment.assert_clean)
        self.deployment.strikes.record()
        await self._ask(name)
        await asyncio.to_thread(self.deployment.assert_clean)
        return self.deployment.strikes.recorded()

    async def disturbed(self, name: str, *strikes: Strike) -> Answer:
        """Return the answer to a request while strikes fall, after every process is back and nothing is held."""
        await self.undisturbed(name)
        await asyncio.to_thread(self.settle)
        known = len(self.deployment.events())
        self.deployment.strikes.arm(*strikes)
        answer = await self._ask(name)
        # The last one may fall a moment after the answer, if its message ended the request.
        await asyncio.to_thread(until, lambda: self.deployment.strikes.left == 0, "the strike", STRIKE_S)
        # A quick request may end before the supervisor notices the death, and then every process seems ready.
        victims = {strike.victim for strike in strikes} - {""}
        await asyncio.to_thread(until, lambda: self._died(known).keys() >= victims, f"the death of {victims}", STRIKE_S)
        await asyncio.to_thread(self.settle)
        died = self._died(known)
        assert died.keys() <= self._mortal(strikes), died
        return answer

    def _died(self, known: int) -> dict[str, Any]:
        """Return the causes of the children that have died since the first `known` events."""
        return {event["child"]: event["cause"] for event in self.deployment.events()[known:] if event["type"] == DIED}

    async def flaws(self, name: str, *strikes: Strike) -> list[str]:
        """Return the differences between the answer with strikes and the undisturbed one."""
        return flaws(await self.disturbed(name, *strikes), self.references[name])

    def settle(self) -> None:
        """Wait until every process is ready, and check that nothing is held."""
        until(lambda: self.deployment.admin("/v1")["state"] == "ready", "ready", END_S)
        self.deployment.assert_clean()

    def _mortal(self, strikes: tuple[Strike, ...]) -> set[str]:
        """Return the processes that may die of strikes. The members of a group die together."""
        victims = {strike.victim for strike in strikes}
        return victims | GROUP if victims & GROUP and self.deployment.family.where is not None else victims

    async def _ask(self, name: str) -> Answer:
        async with new_client(self.deployment.url) as client:
            return await ask(client, self.bodies[name])


def judge_of(deployment: Mortal) -> Judge:
    """Return the judge of a deployment that is ready."""
    return Judge(deployment, deployment.family.bodies(deployment.url))
