"""CPU time of the api per streamed chunk: two source trees in turn, or with and without recording.

Run from the repository root: `python bench/api_chunks.py [--against FOLDER | --recording] [--kind pcm] [--save NAME]`.
Prints one JSON object. With --recording one of two apis records its responses, as beside a supervisor. The api is a
separate process. A fake worker sends a chunk of 4,096 bytes to a quarter of the streams in one message over the real
transport, and the next one when the clients, a third process, have received everything. Chunks therefore never merge
into one write, which would make them cheaper on a busy machine. The measurement is the CPU time of the api process, in
windows in which no request starts or ends. With --profile, py-spy (which must be installed) samples the api in one more
window per tree and reports the shares of its stages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from bench.serving.figures import ROOT, head, summary
from bench.serving.trees import Tree
from tests.api.listeners import spawned
from tests.api.own_process import OwnApi, own_api, spec_in
from tests.fakes.paced import LANES, PacedDeployment, Spoken
from tests.fakes.speech_model import SPEC

RESULTS: Final = ROOT / "bench" / "results" / "api"
RECORDED: Final = "recorded"
SETTLE_S: Final = 0.3
"""Time from the first chunk after a pause to the start of the window."""

KINDS: Final = {
    "pcm": ("/v1/audio/speech", {"input": "x", "stream": True, "response_format": "pcm"}),
    "events": ("/v1/audio/speech", {"input": "x", "stream_format": "sse", "response_format": "pcm"}),
    "lines": ("/generate", {"text": "x", "output_modalities": ["audio"]}),
}
STAGES: Final = (
    ("socket", ("write (asyncio/selector_events.py", "_write_send (asyncio/selector_events.py")),
    ("sanic", ("sanic/",)),
    (
        "time-out, framing and yield of a write",
        ("api/exchange.py", "api/http/sanic_protocol.py", "asyncio/timeouts.py"),
    ),
    ("metrics", ("prometheus_client/", "observe/exposition.py", "api/api_metrics.py")),
    ("telemetry", ("api/telemetry.py", "observe/")),
    ("encoding", ("api/output/line_formats.py", "api/output/audio.py", "base64.py", "_delta (")),
    ("output encoder", ("api/output/encode.py",)),
    ("mailbox and copy of the tensor", ("transport/",)),
    ("decode and link", ("api/link.py", "messages/wire.py")),
    ("output queue and route", ("api/output/queue.py", "api/service.py", "api/routes/")),
    ("event loop", ("asyncio/", "selectors.py")),
)
"""Stack frames by stage; the innermost matching frame decides."""


def main() -> None:
    """Measure, print, and save with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pair = parser.add_mutually_exclusive_group()
    pair.add_argument("--against", type=Path, help="another source tree, measured in turn with this one")
    pair.add_argument("--recording", action="store_true", help="measure this tree without and with recording in turn")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=80, help="steps per window; each round has one window per tree")
    parser.add_argument("--kind", choices=KINDS, default="pcm", help="what the clients ask for")
    parser.add_argument(
        "--profile", action="store_true", help="also profile the stages with py-spy, in further windows"
    )
    parser.add_argument("--save", metavar="NAME", help=f"also write it to {RESULTS.relative_to(ROOT)}/NAME.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options))
        return
    load = os.getloadavg()[0]
    before = ("unrecorded", ROOT) if options.recording else ("before", options.against)
    folders = (before, (RECORDED if options.recording else "now", ROOT))
    trees = [Tree(name, folder, __file__) for name, folder in folders if folder is not None]
    windows = [tree.window("measure") for _ in range(options.rounds) for tree in trees]
    costs = {tree.name: [found["us_per_chunk"] for found in windows if found["tree"] == tree.name] for tree in trees}
    profiles = {tree.name: tree.window("profile")["stages_us"] for tree in trees if options.profile}
    for tree in trees:
        tree.close()
    report = {
        **head(),
        "model": "a stand-in for the worker",
        "kind": options.kind,
        "before": options.against.name if options.against else None,
        "streams": options.streams,
        "workload": f"steps of {options.streams // LANES} chunks of 4,096 bytes, each sent when the clients received "
        f"the previous one; windows of {options.steps} steps, the trees in turn",
        "load_before_and_after": [round(load, 2), round(os.getloadavg()[0], 2)],
        "us_per_chunk": {name: summary(values, "us") for name, values in costs.items()},
        "stages_us": profiles,
        "windows": windows,
    }
    print(json.dumps(report, indent=1))
    if options.save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{options.save}.json").write_text(json.dumps(report, indent=1) + "\n")


class Stepped(PacedDeployment):
    """A worker that starts streams at the pace of speech, and then makes steps only on request."""

    is_paced = True

    def step(self, number: int) -> int:
        """Send one message with a chunk for each stream of a lane. Returns the number of chunks."""
        lane = [stream for stream in self._streams.values() if stream.lane == number % LANES]
        super()._step(lane)
        return len(lane)

    def _step(self, streams: list[Spoken]) -> None:
        if self.is_paced:
            super()._step(streams)


async def serve(options: argparse.Namespace) -> None:
    """Serve one tree: start all streams, then one window per line of standard input."""
    with tempfile.TemporaryDirectory(prefix="mstar-api-") as folder:
        spec = spec_in(folder, SPEC, max_concurrent_requests=options.streams + 8)
        records = {"records": True} if os.environ["BENCH_TREE"] == RECORDED else {}  # other trees may lack it
        async with Stepped(spec.ipc_dir, chunks=1 << 30) as worker, own_api(spec, worker.supervisor, **records) as api:
            await worker.serve()
            await api.ready()
            with spawned(read_all, api.port, options.kind, options.streams) as pipe:
                assert await asyncio.to_thread(pipe.recv) == "all begun"
                worker.is_paced = False
                await asyncio.sleep(SETTLE_S)
                print("{}", flush=True)
                while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
                    print(json.dumps(await window(worker, api, pipe, options.steps, word)), flush=True)


async def window(worker: Stepped, api: OwnApi, pipe: Connection, steps: int, word: str) -> dict[str, Any]:
    """Return the api's CPU time per chunk in microseconds. A step starts when all clients received the previous one."""
    looking = await profiled(api.pid) if word == "profile" else None
    cpu, start, chunks = cpu_s(api.pid), time.monotonic(), 0
    for number in range(steps if looking is None else 4 * steps):
        count = worker.step(number)
        chunks += count
        pipe.send(count)
        await heard(pipe)
    spent, wall = cpu_s(api.pid) - cpu, time.monotonic() - start
    found: dict[str, Any] = {
        "us_per_chunk": round(1e6 * spent / chunks, 1),
        "chunks": chunks,
        "cores": round(spent / wall, 3),
    }
    if looking is not None:
        looking.send_signal(signal.SIGINT)
        stacks = (await looking.communicate())[0].decode()
        found["stages_us"] = stages(stacks, found["us_per_chunk"])
    return found


async def heard(pipe: Connection) -> None:
    """Wait until the clients have received a step."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), done.set)
    await done.wait()
    loop.remove_reader(pipe.fileno())
    pipe.recv()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of another process. Source: its CPU clock, as in clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)


async def profiled(pid: int) -> asyncio.subprocess.Process:
    spy = str(Path(sys.executable).with_name("py-spy"))
    look = ("--pid", str(pid), "--duration", "600", "--rate", "400", "--nonblocking")
    return await asyncio.create_subprocess_exec(
        spy,
        "record",
        *look,
        "--format",
        "raw",
        "--output",
        "/dev/stdout",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )


def stages(stacks: str, us_per_chunk: float) -> dict[str, float]:
    """Return microseconds per chunk by stage, from the shares of the samples in which the process was running."""
    counts: Counter[str] = Counter()
    for line in stacks.splitlines():
        frames, _, number = line.rpartition(" ")
        if number.isdigit():
            counts[stage(frames.split(";"))] += int(number)
    total = sum(counts.values())
    return {name: round(us_per_chunk * count / total, 1) for name, count in counts.most_common()}


def stage(frames: list[str]) -> str:
    """Return the stage of a stack, outermost frame first."""
    for frame in reversed(frames):
        for name, parts in STAGES:
            if any(part in frame for part in parts):
                return name
    return "other"


def read_all(port: int, kind: str, streams: int, pipe: Connection) -> None:
    """Open `streams` streams, then read and discard."""
    path, body = KINDS[kind]
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    asyncio.run(_read_all(port, f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data, streams, pipe))


async def _read_all(port: int, request: bytes, streams: int, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    counter = _Counter(pipe)
    clients = [(await loop.create_connection(lambda: _Client(counter), "127.0.0.1", port))[1] for _ in range(streams)]
    for client in clients:
        client.transport.write(request)
    await asyncio.gather(*(client.begun for client in clients))
    pipe.send("all begun")
    loop.add_reader(pipe.fileno(), counter.expect)
    await asyncio.Event().wait()


class _Counter:
    """Counts the clients that received the current step, and reports its end."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._came: set[_Client] = set()
        self._expected = 0

    def expect(self) -> None:
        """Start a step for a number of clients."""
        self._expected = self._pipe.recv()
        self._tell()

    def note(self, client: _Client) -> None:
        """Count a client that received data."""
        self._came.add(client)
        self._tell()

    def _tell(self) -> None:
        if self._expected and len(self._came) >= self._expected:
            self._expected = 0
            self._came.clear()
            self._pipe.send("heard")


class _Client(asyncio.Protocol):
    """Reads and discards. begun: the response has started with status 200; its error names any other."""

    transport: asyncio.Transport

    def __init__(self, counter: _Counter) -> None:
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._counter = counter

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.begun.done():
            if data.startswith(b"HTTP/1.1 200"):
                self.begun.set_result(None)
            else:
                self.begun.set_exception(RuntimeError(f"a stream was refused: {data!r}"))
        else:
            self._counter.note(self)


if __name__ == "__main__":
    main()
