"""Clients of one deployment: requests at drawn times, 40 % of which their clients end early."""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Final

import httpx

from bench.serving.deployment import Served
from bench.soak.answers import Answer, ask, flaws, prefix_flaws
from bench.soak.media import unseen

LIMIT_S: Final = 300.0
"""No answer takes longer, whatever dies meanwhile."""

MOST_IN_FLIGHT: Final = 48
PROBE_S: Final = 8.0
CLIENTS_OF_PROBE: Final = 3
ENDED_EARLY: Final = ("cancelled by id", "closed")


@dataclass(slots=True)
class Outcome:
    """One request and how it ended.

    kind: whole, cancelled by id, closed, refused (before it ran, with the time to come again), no connection, cut,
    hangs, or the code of its error. cause: the error's words.
    """

    deployment: str
    sample: str
    intent: str
    kind: str
    sent_s: float
    ended_s: float
    pause_s: float
    flaws: list[str]
    cause: str = ""


@dataclass(slots=True)
class Crowd:
    """The clients of one deployment. cancelled: the share of requests that their clients end early.

    rate: requests in a second; set by `measure`. references: undisturbed answers by sample. errors: of these clients.
    """

    served: Served
    bodies: Mapping[str, Mapping[str, Any]]
    draws: random.Random
    cancelled: float
    rate: float = 1.0
    references: dict[str, Answer] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    held_back: int = 0
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _number: int = 0
    _is_over: bool = False
    _is_open: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.served.plan.name

    @property
    def in_flight(self) -> int:
        return len(self._running)

    async def measure(self, share: float) -> None:
        """Take the undisturbed answers, and set the rate to a share of what the deployment serves at most.

        Raises RuntimeError if two undisturbed answers to one request differ.
        """
        async with self._client() as client:
            for name, body in self.bodies.items():
                first, second = await ask(client, body), await ask(client, body)
                self.references[name] = first
                if found := flaws(first, first) or flaws(second, first):
                    raise RuntimeError(f"{self.name}: two undisturbed answers to {name} differ: {found} {first.body}")
            start = time.monotonic()
            counts = await asyncio.gather(*(self._probe(client, start + PROBE_S) for _ in range(CLIENTS_OF_PROBE)))
            self.rate = share * sum(counts) / (time.monotonic() - start)
        self._is_open.set()

    async def run(self, end_s: float) -> None:
        """Send requests at drawn times until `end_s` or `leave`, and wait for the end of each."""
        async with self._client() as client:
            due = time.monotonic()
            while (due := due + self.draws.expovariate(self.rate)) < end_s:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self._is_open.wait()
                if self._is_over:
                    break
                if len(self._running) >= MOST_IN_FLIGHT:
                    self.held_back += 1
                    continue
                task = asyncio.create_task(self._one(client))
                self._running.add(task)
                task.add_done_callback(self._ended)
            await self.idle()

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        while self._running:
            await asyncio.wait(self._running)

    def pause(self) -> None:
        """Send no further request until `resume`."""
        self._is_open.clear()

    def resume(self) -> None:
        self._is_open.set()

    def leave(self) -> None:
        """Send no further request."""
        self._is_over = True

    def counts(self) -> Counter[str]:
        """Return the number of requests by outcome."""
        return Counter(outcome.kind for outcome in self.outcomes)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.errors.append(f"{type(error).__name__}: {error}")

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.served.plan.port}", timeout=LIMIT_S, limits=limits)

    async def _probe(self, client: httpx.AsyncClient, end_s: float) -> int:
        """Send one request after the other until `end_s`. Returns their number."""
        count = 0
        for name in cycle(self.bodies):
            await ask(client, self.bodies[name])
            count += 1
            if time.monotonic() >= end_s:
                break
        return count

    async def _one(self, client: httpx.AsyncClient) -> None:
        sample = self.draws.choice(list(self.bodies))
        self._number += 1
        id_ = f"soak-{self.name}-{self._number}"
        body = {**self._with_media(self.bodies[sample]), "request_id": id_}
        ends_early = self.draws.random() < self.cancelled
        intent = self.draws.choice(ENDED_EARLY) if ends_early else "whole"
        reference, answer = self.references[sample], Answer()
        moment_s = self.draws.uniform(0.0, reference.ended_s - reference.sent_s)
        asking = asyncio.create_task(ask(client, body, answer))
        if ends_early:
            await asyncio.wait([asking], timeout=moment_s)
            await self._end(client, intent, id_, asking)
        await asyncio.wait([asking], timeout=LIMIT_S)
        hangs = not asking.done()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        self.outcomes.append(self._judged(sample, intent, answer, "hangs" if hangs else kind_of(intent, answer)))

    def _with_media(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request with files whose bytes no process has seen."""
        files = [
            {**file, "data": base64.b64encode(unseen(base64.b64decode(file["data"]), self.draws)).decode()}
            for file in body.get("files", [])
        ]
        return {**body, **({"files": files} if files else {})}

    async def _end(self, client: httpx.AsyncClient, intent: str, id_: str, asking: asyncio.Task[Answer]) -> None:
        if asking.done():
            return
        if intent == "closed":
            asking.cancel()
            return
        try:
            await client.post(f"/v1/requests/{id_}/cancel")
        except httpx.ConnectError as error:
            self.errors.append(f"no connection for a cancel: {error}")
        except httpx.TransportError:
            return  # the api died with this call; the request itself is judged by its stream

    def _judged(self, sample: str, intent: str, answer: Answer, kind: str) -> Outcome:
        reference = self.references[sample]
        found = flaws(answer, reference) if kind == "whole" else prefix_flaws(answer, reference)
        return Outcome(
            deployment=self.name,
            sample=sample,
            intent=intent,
            kind=kind,
            sent_s=answer.sent_s,
            ended_s=answer.ended_s,
            pause_s=answer.longest_pause_s,
            flaws=found,
            cause=answer.sentence if kind not in ("whole", *ENDED_EARLY) else "",
        )


def kind_of(intent: str, answer: Answer) -> str:
    """Return the outcome of a request. A request that was to end early may be whole: its end came first."""
    if answer.is_refused:
        return "no connection"
    if answer.is_whole:
        return "whole"
    if answer.has_left:
        return "closed"
    if answer.code == "cancelled" and intent == "cancelled by id":
        return "cancelled by id"
    if answer.status in (429, 503) and not answer.lines and "retry-after" in answer.headers:
        return "refused"
    if answer.is_cut or not (answer.ends or answer.body):
        return "cut"
    return answer.code or f"status {answer.status}"
