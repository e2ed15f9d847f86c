"""Cost of the gateway: time that it adds before the first byte of an answer, and processor time per request and chunk.

Client, gateway and a fake deployment that takes 5 ms to answer are three processes on this host. The gateway is the
door with the gate of a gateway without tenants, which writes down every request, and with four models that share a
device, in a ledger of real files. Requests are a conversation in JSON,
a form, and a form with three camera images, and go to the deployment directly and through each gateway, by turns, so
that the load of the host meets all alike. `--against TREE` adds the gateway of another checkout. Usage:

    python bench/gateway_cost.py [--requests 400] [--chunks 2000] [--against TREE] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import uvloop
from aiohttp import web

from bench.robot_requests import images_of
from mstar_core.gateway.door.door import Door
from mstar_core.gateway.fleet.clock import MonotonicClock
from mstar_core.gateway.fleet.head import DeploymentHead
from mstar_core.gateway.fleet.hosts.hosts import FleetHosts
from mstar_core.gateway.fleet.managed import ManagedFleet
from mstar_core.gateway.fleet.owned import OwnedNames
from mstar_core.gateway.fleet.running import RunningFleet
from mstar_core.gateway.parts import Replica
from mstar_core.gateway.serve_file import ModelEntry, ServeFile
from mstar_core.gateway.tenants.gate import TenantGate
from mstar_core.host.gpu_locks import Holder, acquire_gpus, gpu_holders
from tests.fakes.deployments import FakeDeployment, serve_on_port
from tests.fakes.fleet import TOTAL, FakeHost

ROOT: Final = Path(__file__).resolve().parents[1]
CHUNK: Final = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"delta":{"content":" word"}}]}\n\n'
)
BODY: Final = {"model": "llm", "stream": True, "messages": [{"role": "user", "content": "Tell me about walks. " * 20}]}
BOUNDARY: Final = "between-the-parts"
MODELS: Final = ("llm", "omni", "robot", "tts")
DEVICE: Final = f"bench-{os.getpid()}"
OUT: Final = Path(__file__).parent / "results" / "gateway" / "cost.json"
COMPUTE_S: Final = 0.005
"""Time of the fake deployment before its first byte, which is short for a model."""

UNMEASURED: Final = 20
"""First requests of each kind, which open the connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of request. path: below the deployment's address, and below a gateway's."""

    path: str
    gateway_path: str
    body: bytes
    content_type: str


def kinds() -> dict[str, Kind]:
    """Return the kinds of requests by name."""
    form = f"multipart/form-data; boundary={BOUNDARY}"
    at = {"path": "/generate", "gateway_path": "/m/llm/generate", "content_type": form}
    chat = "/v1/chat/completions"
    json_body = json.dumps(BODY).encode()
    return {
        "chat": Kind(path=chat, gateway_path=chat, body=json_body, content_type="application/json"),
        "form": Kind(body=form_of(()), **at),
        "images": Kind(body=form_of(images_of(224)), **at),
    }


def form_of(images: Any) -> bytes:
    """Return a form with a text and images."""
    parts = [('name="text"', b"pick up the red block"), ('name="streaming"', b"false")]
    parts += [(f'name="files"; filename="{number}.png"', data) for number, data in enumerate(images)]
    lines = [
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; {name}\r\n\r\n".encode() + data + b"\r\n"
        for name, data in parts
    ]
    return b"".join(lines) + f"--{BOUNDARY}--\r\n".encode()


# -- servers, each in a process of its own -----------------------------------------------------------------------------


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    """Send as many chunks as the header says, each by a write of its own, after the time that it says."""
    await request.content.read()
    if compute_s := float(request.headers.get("X-Compute", "0")):
        await asyncio.to_thread(time.sleep, compute_s)  # finer than the timers of an event loop
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    pause_s = float(request.headers.get("X-Pause", "0"))
    for _ in range(int(request.headers.get("X-Chunks", "1"))):
        await response.write(CHUNK)
        if pause_s:
            await asyncio.sleep(pause_s)
    await response.write_eof()
    return response


async def serve_deployment() -> None:
    """Serve a fake deployment until stdin closes."""
    fake = FakeDeployment("llm", handler=answer)
    await fake.start()
    await served(fake.url)
    await fake.close()


@dataclass
class LedgerHost(FakeHost):
    """A host whose deployments are all at one address and share a device of the real ledger."""

    url: str = ""

    def holders(self, key: str) -> Sequence[Holder]:
        """Return the holders, read as a gateway's host reads them."""
        return gpu_holders(key)

    async def heads(self, names: Sequence[str]) -> Mapping[str, tuple[Replica, DeploymentHead | None]]:
        """Return the heads, with the address."""
        found = await super().heads(names)
        return {name: (replace(replica, url=self.url), head) for name, (replica, head) in found.items()}


async def managed_fleet(url: str, folder: Path) -> ManagedFleet:
    """Return a fleet of awake models that share a device."""
    host = LedgerHost({name: {DEVICE: TOTAL // len(MODELS)} for name in MODELS}, url=url)
    serve = ServeFile(models={name: ModelEntry(target=name, name=name) for name in MODELS}, discover=False)
    hosts = FleetHosts(lambda name: host)
    fleet = ManagedFleet(serve, hosts, MonotonicClock(), RunningFleet(serve), OwnedNames(folder))
    await fleet.start()
    for name in MODELS:
        acquire_gpus({"cuda:0": DEVICE}, name, (await host.survey(serve.models[name])).claims)
        await fleet.ready(name, lambda progress: None)
    return fleet


async def serve_gateway(deployment: str) -> None:
    """Serve a gateway in front of a deployment until stdin closes."""
    with tempfile.TemporaryDirectory(prefix="mg-", dir="/tmp") as folder:
        os.environ["MSTAR_RUNTIME_DIR"] = folder
        gate = TenantGate(ServeFile(), Path(folder))
        await gate.start()
        fleet = await managed_fleet(deployment, Path(folder))
        door = Door(fleet, gate, ServeFile())
        await door.start()
        server: web.Server[Any] = web.Server(
            door.handle, handler_cancellation=True, auto_decompress=False, access_log=None
        )
        url, close = await serve_on_port(server)
        await served(url)
        await close()
        await door.close()
        await fleet.close(is_final=False)
        await gate.close()


async def served(url: str) -> None:
    """Print the address, then this process's processor time for each line of stdin."""
    print(url, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(usage.ru_utime + usage.ru_stime, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server in a process of its own. url: its address."""

    process: subprocess.Popen[str]
    url: str

    async def processor_s(self) -> float:
        """Return the processor time that the process has used, in seconds."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write("time\n")
        stdin.flush()
        return float(await asyncio.to_thread(stdout.readline))


@contextmanager
def running(*words: str, tree: Path = ROOT) -> Iterator[Server]:
    """Run a server. tree: checkout whose gateway it is."""
    command = [sys.executable, __file__, "--serve", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tree), str(ROOT)))}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=tree
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield Server(process=process, url=process.stdout.readline().strip())
    finally:
        process.stdin.close()
        process.wait(30)


# -- the client --------------------------------------------------------------------------------------------------------


async def first_bytes(
    session: aiohttp.ClientSession, urls: Mapping[str, str], kind: Kind, count: int
) -> dict[str, list[float]]:
    """Return the times to the first byte by server, in seconds. The servers take turns, in changing order."""
    times: dict[str, list[float]] = {name: [] for name in urls}
    headers = {"Content-Type": kind.content_type, "X-Compute": str(COMPUTE_S)}
    for number in range(count + UNMEASURED):
        shift = number % len(urls)
        for name in [*urls][shift:] + [*urls][:shift]:
            begun = time.perf_counter()
            async with session.post(urls[name], data=kind.body, headers=headers) as response:
                await response.content.readany()
                took = time.perf_counter() - begun
                await response.content.read()
            if number >= UNMEASURED:
                times[name].append(took)
    return times


async def per_request_s(session: aiohttp.ClientSession, gateway: Server, ask: Callable[[], Any], count: int) -> float:
    """Return the gateway's processor time of one request."""
    before = await gateway.processor_s()
    for _ in range(count):
        await ask()
    return (await gateway.processor_s() - before) / count


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


async def measure_kind(
    session: aiohttp.ClientSession, deployment: Server, gateways: Mapping[str, Server], kind: Kind, requests: int
) -> dict[str, Any]:
    """Measure one kind of request."""
    urls = {"direct": deployment.url + kind.path} | {
        name: gateway.url + kind.gateway_path for name, gateway in gateways.items()
    }
    times = await first_bytes(session, urls, kind, requests)
    found: dict[str, Any] = {"body_bytes": len(kind.body), "direct_ms": spread(times["direct"])}
    for name, gateway in gateways.items():
        differences = [through - direct for through, direct in zip(times[name], times["direct"], strict=True)]

        async def ask(url: str = urls[name]) -> None:
            async with session.post(url, data=kind.body, headers={"Content-Type": kind.content_type}) as response:
                await response.read()

        processor_s = await per_request_s(session, gateway, ask, requests)
        found[name] = {
            "first_byte_ms": spread(times[name]),
            "added_ms": spread(differences),
            "processor_per_request_us": round(1e6 * processor_s, 1),
        }
    return found


async def measure_chunks(session: aiohttp.ClientSession, gateway: Server, requests: int, chunks: int) -> dict[str, Any]:
    """Measure the gateway's processor time per chunk of a stream."""
    alone_s = await per_request_s(session, gateway, lambda: stream(session, gateway.url, 1, 0.0), requests)
    # Paced streams, so that each chunk arrives and leaves by itself, as those of a model do.
    streams = 16
    before = await gateway.processor_s()
    await asyncio.gather(*(stream(session, gateway.url, chunks, 0.005) for _ in range(streams)))
    paced_s = (await gateway.processor_s() - before - streams * alone_s) / (streams * chunks)
    before = await gateway.processor_s()
    await stream(session, gateway.url, 20 * chunks, 0.0)
    dense_s = (await gateway.processor_s() - before - alone_s) / (20 * chunks)
    return {
        "processor_per_chunk_us": round(1e6 * paced_s, 2),
        "processor_per_chunk_dense_us": round(1e6 * dense_s, 2),
        "paced_chunks": streams * chunks,
        "chunk_bytes": len(CHUNK),
    }


async def measure(deployment: Server, gateways: Mapping[str, Server], requests: int, chunks: int) -> dict[str, Any]:
    """Measure all figures."""
    async with aiohttp.ClientSession() as session:
        result: dict[str, Any] = {
            name: await measure_kind(session, deployment, gateways, kind, requests) for name, kind in kinds().items()
        }
        result["chunks"] = {
            name: await measure_chunks(session, gateway, requests, chunks) for name, gateway in gateways.items()
        }
    return {"requests": requests, **result}


def spread(values: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds. values: seconds."""
    ordered = sorted(values)
    found = {
        name: round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)
        for name, share in (("p10", 0.1), ("p99", 0.99))
    }
    return {**found, "p50": round(1000 * statistics.median(ordered), 4)}


def main() -> None:
    """Run the measurement, print it and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--chunks", type=int, default=400)
    parser.add_argument("--against", type=Path, help="checkout whose gateway is measured in turn with this one")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve_deployment() if args.serve[0] == "deployment" else serve_gateway(args.serve[1]))
        return
    with ExitStack() as stack:
        deployment = stack.enter_context(running("deployment"))
        trees = {"gateway": ROOT} | ({} if args.against is None else {"before": args.against.resolve()})
        gateways = {
            name: stack.enter_context(running("gateway", deployment.url, tree=tree)) for name, tree in trees.items()
        }
        load = [round(each, 2) for each in os.getloadavg()]
        result = uvloop.run(measure(deployment, gateways, args.requests, args.chunks))
    facts = {
        "cores": os.cpu_count(),
        "load_before": load,
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
