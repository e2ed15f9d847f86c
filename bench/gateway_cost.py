"""Cost of the gateway: time that it adds before the first byte of an answer, and its processor time per chunk.

Client, gateway and a fake deployment are three processes on this host. Requests go to the deployment directly and
through the gateway, by turns, so that the load of the host meets both alike. Usage:

    python bench/gateway_cost.py [--requests 400] [--chunks 2000] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from mstar_core.gateway.door.door import Door
from mstar_core.gateway.serve_file import ServeFile
from tests.fakes.deployments import FakeDeployment, FakeFleet, serve_on_port
from tests.fakes.open_gate import OpenGate

CHUNK = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"delta":{"content":" word"}}]}\n\n'
BODY = {"model": "llm", "stream": True, "messages": [{"role": "user", "content": "Tell me about walks. " * 20}]}
OUT = Path(__file__).parent / "results" / "gateway" / "cost.json"


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    """Send as many chunks as the header says, each by a write of its own."""
    await request.content.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    pause_s = float(request.headers.get("X-Pause", "0"))
    for _ in range(int(request.headers.get("X-Chunks", "1"))):
        await response.write(CHUNK)
        if pause_s:
            await asyncio.sleep(pause_s)
    await response.write_eof()
    return response


async def serve_deployment(pipe: Connection) -> None:
    """Serve a fake deployment until the pipe closes."""
    fake = FakeDeployment("llm", handler=answer)
    await fake.start()
    pipe.send(fake.url)
    await asyncio.to_thread(pipe.recv)
    await fake.close()


async def serve_gateway(pipe: Connection) -> None:
    """Serve a door in front of the deployment. Answers each message with this process's processor time."""
    fake = FakeDeployment("llm", url=pipe.recv())
    door = Door(FakeFleet([fake]), OpenGate(), ServeFile())
    await door.start()
    server: web.Server[Any] = web.Server(door.handle, handler_cancellation=True, auto_decompress=False, access_log=None)
    url, close = await serve_on_port(server)
    pipe.send(url)
    while await asyncio.to_thread(pipe.recv):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(usage.ru_utime + usage.ru_stime)
    await close()
    await door.close()


def child(target: Any, pipe: Connection) -> None:
    """Run a server in this process."""
    uvloop.run(target(pipe))


@contextmanager
def process(target: Any) -> Iterator[Connection]:
    """Yield the pipe of a server in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    running = context.Process(target=child, args=(target, theirs))
    running.start()
    try:
        yield ours
    finally:
        ours.send(None)
        running.join(10)


async def first_bytes(session: aiohttp.ClientSession, urls: tuple[str, str], count: int) -> dict[str, list[float]]:
    """Return the times to the first byte, directly and through the gateway, by turns."""
    times: dict[str, list[float]] = {url: [] for url in urls}
    for number in range(2 * (count + 20)):
        url = urls[number % 2]
        begun = time.perf_counter()
        async with session.post(f"{url}/v1/chat/completions", json=BODY) as response:
            await response.content.readany()
            took = time.perf_counter() - begun
            await response.content.read()
        if number >= 40:
            times[url].append(took)
    return times


async def stream(session: aiohttp.ClientSession, url: str, chunks: int, pause_s: float) -> int:
    """Read one stream and return its bytes."""
    headers = {"X-Chunks": str(chunks), "X-Pause": str(pause_s)}
    size = 0
    async with session.post(f"{url}/v1/chat/completions", json=BODY, headers=headers) as response:
        async for piece in _pieces(response):
            size += len(piece)
    assert size == chunks * len(CHUNK)
    return size


async def _pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    while piece := await response.content.readany():
        yield piece


async def measure(deployment: str, gateway: str, pipe: Connection, requests: int, chunks: int) -> dict[str, Any]:
    """Measure both figures."""

    async def processor_s() -> float:
        pipe.send("time")
        return float(await asyncio.to_thread(pipe.recv))

    async with aiohttp.ClientSession() as session:
        times = await first_bytes(session, (deployment, gateway), requests)
        before = await processor_s()
        for _ in range(requests):
            await stream(session, gateway, 1, 0.0)
        per_request_s = (await processor_s() - before) / requests
        # Paced streams, so that each chunk arrives and leaves by itself, as those of a model do.
        streams = 16
        before = await processor_s()
        await asyncio.gather(*(stream(session, gateway, chunks, 0.005) for _ in range(streams)))
        paced_s = (await processor_s() - before - streams * per_request_s) / (streams * chunks)
        before = await processor_s()
        await stream(session, gateway, 20 * chunks, 0.0)
        dense_s = (await processor_s() - before - per_request_s) / (20 * chunks)
    direct, through = sorted(times[deployment]), sorted(times[gateway])
    return {
        "first_byte_direct_ms": spread(direct),
        "first_byte_gateway_ms": spread(through),
        "added_first_byte_p50_ms": round(1000 * (statistics.median(through) - statistics.median(direct)), 4),
        "processor_per_request_us": round(1e6 * per_request_s, 1),
        "processor_per_chunk_us": round(1e6 * paced_s, 2),
        "processor_per_chunk_dense_us": round(1e6 * dense_s, 2),
        "requests": requests,
        "paced_chunks": streams * chunks,
        "chunk_bytes": len(CHUNK),
    }


def spread(ordered: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds. ordered: seconds, ascending."""
    return {
        name: round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)
        for name, share in (("p10", 0.1), ("p50", 0.5), ("p99", 0.99))
    }


def main() -> None:
    """Run the measurement, print it and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--chunks", type=int, default=400)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with process(serve_deployment) as deployment, process(serve_gateway) as gateway:
        url = deployment.recv()
        gateway.send(url)
        result = uvloop.run(measure(url, gateway.recv(), gateway, args.requests, args.chunks))
    facts = {
        "cores": os.cpu_count(),
        "load": [round(each, 2) for each in os.getloadavg()],
        "python": platform.python_version(),
        "aiohttp": aiohttp.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    text = json.dumps({**result, "host": facts}, indent=1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
