"""Load patterns: closed loop, Poisson arrivals, burst, and a storm in which many clients disconnect.

Every load returns the results of its clients without judging them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from bench.serving.client import Heard, ask
from mstarctl.bench.load.arrivals import Arrivals, schedule

WORDS: Final = "the quick brown fox jumps over a lazy dog while sun goes down behind green hills and sings".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Destination and content of requests. ids: number of audio ids of a request, all of them sampled."""

    port: int
    ids: int
    kwargs: dict[str, Any] = field(default_factory=dict)

    def body(self, number: int, ids: int | None = None) -> dict[str, Any]:
        """Return the body of request `number`. Words and seed are its own, so that no prefix cache helps."""
        words = random.Random(number).sample(WORDS, len(WORDS))
        return {
            "text": " ".join(words),
            "output_modalities": "audio",
            "stream_events": "full",
            "model_kwargs": {
                "max_output_tokens": ids or self.ids,
                "ignore_eos": True,
                "seed": number,
                "voice": "tara",
                **self.kwargs,
            },
        }


@dataclass(slots=True)
class Round:
    """Results of one load, with its wall time."""

    heard: list[Heard] = field(default_factory=list)
    wall_s: float = 0.0


async def closed_loop(target: Target, streams: int, rounds: int, first: int = 0) -> Round:
    """Run `streams` clients that send `rounds` requests each, one after the other."""

    async def one(client: int) -> list[Heard]:
        return [await ask(target.port, target.body(first + client * rounds + turn)) for turn in range(rounds)]

    start = time.monotonic()
    groups = await asyncio.gather(*(one(client) for client in range(streams)))
    return Round([heard for group in groups for heard in group], time.monotonic() - start)


async def open_loop(target: Target, per_s: float, span_s: float, first: int = 0, seed: int = 1) -> Round:
    """Send requests with Poisson arrivals at `per_s` for `span_s` seconds, regardless of earlier requests."""
    return await arriving(target, schedule(Arrivals.parse("poisson", per_s), seed, span_s=span_s), first)


async def burst(target: Target, count: int, first: int = 0) -> Round:
    """Send `count` requests at the same time."""
    return await arriving(target, [0.0] * count, first)


async def arriving(target: Target, arrivals: list[float], first: int) -> Round:
    """Send one request at each time, in seconds from now. A request's clock starts at its own arrival."""
    start = time.monotonic()

    async def one(number: int, at_s: float) -> Heard:
        await asyncio.sleep(max(0.0, start + at_s - time.monotonic()))
        return await ask(target.port, target.body(first + number))

    heard = await asyncio.gather(*(one(number, at_s) for number, at_s in enumerate(arrivals)))
    return Round(list(heard), time.monotonic() - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """Requests of random lengths, a share of which disconnects at a random time. at_once: number of clients."""

    requests: int
    at_once: int
    most_ids: int
    leaving: float = 0.5
    longest_s: float = 0.4
    seed: int = 7


async def storm(target: Target, plan: Storm, tally: Callable[[Heard], None]) -> float:
    """Send all requests and return the seconds taken. `tally` receives each result; none is kept."""
    chance, left = random.Random(plan.seed), iter(range(plan.requests))

    async def one() -> None:
        for number in left:
            ids = chance.randint(1, plan.most_ids)
            away = chance.uniform(0.0, plan.longest_s) if chance.random() < plan.leaving else None
            tally(await ask(target.port, target.body(number, ids), leave_after_s=away))

    start = time.monotonic()
    await asyncio.gather(*(one() for _ in range(plan.at_once)))
    return time.monotonic() - start
