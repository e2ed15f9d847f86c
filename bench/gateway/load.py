"""Load of the benchmark on a gateway: starts, wakes in turn, pairs, chunks, and a mixed load until the time is over."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.gateway.client import Heard, Lost, send
from bench.gateway.models import MODELS, STARTS, Ask, asks
from bench.gateway.watch import Watch, state_of
from bench.serving.figures import Figures

ADDED: Final = ("bagel", "pi05")
"""Models of which the added first byte is measured: with a text alone, and with three images in the request."""

SPOKEN: Final = "bagel"
STREAMS: Final = 8
TOKENS: Final = 384
"""Streams at once, and tokens of each, for the processor time per chunk."""

START_S: Final = 200.0
LIMIT_S: Final = 120.0
"""Longest start, and longest other request; a longer one is lost."""

PHASE_S: Final = 40.0
"""Longest measurement of pairs of one model, and of chunks."""

LEAST_S: Final = 20.0
"""Time that a mixed load needs at least; with less it is left out."""


@dataclass(slots=True, kw_only=True)
class Load:
    """The load of one run. until: end of the load by `time.perf_counter`. save: called after each phase.

    lost: requests without a whole answer. cut: requests that ran when the time was over.
    """

    url: str
    run_dir: Path
    watch: Watch
    figures: Figures
    say: Callable[[str], None]
    save: Callable[[str, Any], None]
    until: float
    clients: int
    pairs: int
    rounds: int
    mixed_s: float
    lost: list[str] = field(default_factory=list)
    cut: int = 0
    sent: int = 0
    asks: Mapping[str, Ask] = field(default_factory=asks)

    async def run(self) -> None:
        """Run all phases. What does not fit into the time is left out, and said."""
        try:
            async with asyncio.timeout(self.until - time.perf_counter()):
                connector = aiohttp.TCPConnector(limit=64)
                async with aiohttp.ClientSession(connector=connector) as session:
                    await self._phases(session)
        except TimeoutError:
            self.say("the time of the load is over")

    async def _phases(self, session: aiohttp.ClientSession) -> None:
        self.save("starts", [step for names in STARTS for step in await self._at_once(session, names)])
        steps: list[dict[str, Any]] = []
        for _ in range(self.rounds):
            for name in MODELS:
                steps.append(await self._step(session, name, LIMIT_S))
                self.save("turns", steps)
        for name in ADDED:
            await self._phase(f"pairs of {name}", self._added(session, name))
        await self._phase("chunks", self._chunks(session))
        self.save("mixed", await self._mixed(session))

    async def _phase(self, title: str, work: Any) -> None:
        self.say(title)
        try:
            async with asyncio.timeout(PHASE_S):
                await work
        except TimeoutError:
            self.say(f"{title}: ended after {PHASE_S:.0f} s")
        except (Lost, OSError, aiohttp.ClientError) as error:
            self._note(title, error)

    # -- requests --------------------------------------------------------------------------------------------------

    async def _at_once(self, session: aiohttp.ClientSession, names: tuple[str, ...]) -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(self._step(session, name, START_S) for name in names)))

    async def _step(self, session: aiohttp.ClientSession, name: str, limit_s: float) -> dict[str, Any]:
        """Ask one model. Returns what it met and took, with the states and the memory after it."""
        kind, heard = await self._ask(session, name, limit_s)
        models = await self.watch.models()
        first_s = None if heard is None else round(heard.first_s, 4)
        self.say(f"{name}: {kind}, first byte after {first_s} s")
        return {
            "model": name,
            "met": kind,
            "first_byte_s": first_s,
            "states": {each: state_of(item) for each, item in models.items()},
            "held": {each: item["held"] for each, item in models.items()},
        }

    async def _ask(self, session: aiohttp.ClientSession, name: str, limit_s: float) -> tuple[str, Heard | None]:
        """Send one request. Returns what it met, and its answer; None if it was lost."""
        kind = met((await self.watch.models())[name])
        self.sent += 1
        try:
            with self.watch.waiting(name):
                heard = await send(session, f"{self.url}/m/{name}", self.asks[name], limit_s)
        except Lost as error:
            self._note(name, error)
            return kind, None
        except asyncio.CancelledError:
            self.cut += 1
            raise
        self.figures.add(f"first_byte_{kind}_{name}", [heard.first_s])
        self.figures.add(f"first_byte_{kind}", [heard.first_s])
        if heard.audio_s:
            self.figures.add(f"gaps_{kind}_{name}", [heard.gaps], "1")
        return kind, heard

    def _note(self, what: str, error: Exception) -> None:
        self.lost.append(f"{what}: {error}")
        self.say(f"lost: {what}: {error}")
        self.save("lost", self.lost)

    # -- phases ----------------------------------------------------------------------------------------------------

    async def _added(self, session: aiohttp.ClientSession, name: str) -> None:
        """Measure a model directly and through the gateway, by turns, the first of a pair alternating."""
        through, ask = f"{self.url}/m/{name}", self.asks[name]
        await send(session, through, ask, LIMIT_S)
        urls = {"gateway": through, "direct": deployment_url(self.run_dir, name)}
        for number in range(self.pairs):
            order = list(urls) if number % 2 else list(urls)[::-1]
            took = {way: (await send(session, urls[way], ask, LIMIT_S)).first_s for way in order}
            self.figures.add(f"added_first_byte_{name}", [took["gateway"] - took["direct"]])
            for way, first_s in took.items():
                self.figures.add(f"pair_{way}_{name}", [first_s])

    async def _chunks(self, session: aiohttp.ClientSession) -> None:
        """Measure the gateway's processor time for streams of an awake model, per piece that it relays."""
        url, ask = f"{self.url}/m/{SPOKEN}", asks(TOKENS)[SPOKEN]
        await send(session, url, ask, LIMIT_S)
        pieces = await self._pieces()  # its own cost stays outside
        cpu_s = await self.watch.processor_s()
        heard = await asyncio.gather(*(send(session, url, ask, LIMIT_S) for _ in range(STREAMS)))
        cpu_s, pieces = await self.watch.processor_s() - cpu_s, await self._pieces() - pieces
        self.save(
            "chunks",
            {
                "model": SPOKEN,
                "streams": STREAMS,
                "took_s": round(max(each.took_s for each in heard), 3),
                "pieces": pieces,
                "gateway_processor_s": round(cpu_s, 3),
                "processor_per_piece_us": round(1e6 * cpu_s / pieces, 1) if pieces else None,
            },
        )

    async def _pieces(self) -> int:
        return int((await self.watch.series()).get("mstar_gateway_pieces_total", 0))

    async def _mixed(self, session: aiohttp.ClientSession) -> dict[str, Any] | None:
        """Let clients choose models at random. Returns counts; None if too little time is left."""
        began = time.perf_counter()
        until = min(began + self.mixed_s, self.until - LEAST_S)
        if until - began < LEAST_S:
            self.say("no time is left for a mixed load")
            return None
        self.say(f"mixed load of {self.clients} clients for {until - began:.0f} s")
        before, pieces, sent = await self.watch.models(), await self._pieces(), self.sent
        cpu_s = await self.watch.processor_s()
        work = [asyncio.create_task(self._client(session, seed, until)) for seed in range(self.clients)]
        _, late = await asyncio.wait(work, timeout=self.until - 5.0 - began)
        took_s = time.perf_counter() - began
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        cpu_s = await self.watch.processor_s() - cpu_s
        after, pieces = await self.watch.models(), await self._pieces() - pieces
        wakes = {name: after[name]["wakes"] - before[name]["wakes"] for name in MODELS}
        return {
            "s": round(took_s, 1),
            "requests": self.sent - sent,
            "wakes": wakes,
            "loads": {name: after[name]["loads"] - before[name]["loads"] for name in MODELS},
            "wakes_per_minute": round(60 * sum(wakes.values()) / took_s, 2),
            "pieces": pieces,
            "gateway_processor_s": round(cpu_s, 3),
            "gateway_processor_share": round(cpu_s / took_s, 4),
        }

    async def _client(self, session: aiohttp.ClientSession, seed: int, until: float) -> None:
        draw = random.Random(seed)
        while time.perf_counter() < until:
            name = draw.choice(list(MODELS))
            for _ in range(draw.randint(1, 6)):
                if time.perf_counter() >= until:
                    break
                _, heard = await self._ask(session, name, LIMIT_S)
                if heard is None:
                    await asyncio.sleep(1.0)


def met(item: Mapping[str, Any]) -> str:
    """Return what a request meets: a model that is awake, loads or wakes, sleeps at a level, or must be started.

    One that is being put to sleep has no level yet.
    """
    match item["state"]:
        case "ready" | "idle":
            return "awake"
        case "sleeping":
            return f"wake_{item['sleep_level']}" if item["sleep_level"] else "falling_asleep"
        case "loading":
            return "loading"
        case _:
            return "start"


def deployment_url(run_dir: Path, name: str) -> str:
    """Return the address of a deployment's own api, from its record."""
    record = run_dir / name / "spec.json"
    return f"http://127.0.0.1:{json.loads(record.read_bytes())['api']['port']}"
