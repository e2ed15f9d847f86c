"""Client process of a load test: sends the requests of its plan on time and reports what it received.

Run as `python -m mstarctl.bench.client.process PLAN`. Commands come on stdin, messages of `wire` go to stdout.
"""

from __future__ import annotations

import asyncio
import gc
import math
import mmap
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from mstarctl.bench.client.connection import Connection, ConnectionPool, Exchange
from mstarctl.bench.client.wire import (
    ClientPlan,
    ClientReady,
    Counters,
    FromClient,
    Job,
    Phase,
    PhaseEnd,
    Record,
    packed,
)

REPORT_S: Final = 0.25
COLLECT_S: Final = 2.0
TICK_S: Final = 0.01
STDIN: Final = 0
READ_BYTES: Final = 4096
TIMER_S: Final = 0.002
"""Resolution of the timers of event loops, with a margin."""

EXACT_PER_S: Final = 200.0
"""Up to this rate the last millisecond before a request is spent in turns of the loop, so that it leaves on time."""

REFUSED_S: Final = 0.5
"""Wait of a client after a refusal without Retry-After, or after a connection that could not be opened."""

LONGEST_RETRY_S: Final = 60.0
REFUSALS: Final = (429, 503)

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Outbox:
    """Writes messages to the parent in a thread, so that a full pipe never blocks the event loop."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._queue: queue.SimpleQueue[FromClient | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: FromClient) -> None:
        """Send a message later."""
        self._queue.put(message)

    def close(self) -> None:
        """Send the rest and stop."""
        self._queue.put(None)
        self._thread.join()

    def _write(self) -> None:
        with suppress(BrokenPipeError):  # the parent has ended
            while (message := self._queue.get()) is not None:
                self._file.write(packed(message))
                if self._queue.empty():
                    self._file.flush()
            self._file.flush()


class LoadClient:
    """Sends the requests of one process. Owned by `serve`. is_stopping: send no further requests."""

    def __init__(self, plan: ClientPlan, bodies: mmap.mmap | bytes, outbox: Outbox) -> None:
        self.plan = plan
        self.is_stopping = False
        self._bodies = bodies
        self._outbox = outbox
        self._pool = ConnectionPool(plan.server)
        self._tasks: set[asyncio.Task[object]] = set()
        self._live: dict[Exchange, Connection | None] = {}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in plan.server.headers.items())
        self._idle = asyncio.Event()
        self._stopped = asyncio.Event()
        self._reason = ""
        self._is_exact = False
        self.sent = self.ended = 0

    @property
    def in_flight(self) -> int:
        return len(self._live)

    def stop(self, reason: str = "") -> None:
        """Send no further requests."""
        self.is_stopping = True
        self._reason = self._reason or reason
        self._stopped.set()

    async def run(self, number: int, start_ns: int) -> None:
        """Run one phase, whose time starts at `start_ns`, and report its end."""
        phase = self.plan.phases[number]
        self._is_exact = is_exact(phase)
        if phase.clients:
            await self._closed(number, phase, start_ns)
        else:
            await self._open(number, phase, start_ns)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.plan.grace_s)
        for exchange in list(self._live):
            self._cut(exchange, "incomplete")
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._outbox.put(PhaseEnd(self.plan.number, number, self._reason))

    async def _open(self, number: int, phase: Phase, start_ns: int) -> None:
        loop = asyncio.get_running_loop()
        for place, job in enumerate(phase.jobs):
            if place and phase.limit_s and job.due_s > phase.limit_s:
                return
            due_ns = start_ns + round(job.due_s * 1e9)
            if not await self._until(due_ns) or self.is_stopping:
                return
            if self.in_flight >= self.plan.max_in_flight:
                self.stop("max_in_flight")
                return
            self._spawn(loop, self._one(number, job, 0, due_ns))

    async def _until(self, due_ns: int) -> bool:
        """Sleep until a time, never ending early. Returns whether requests may still be sent."""
        early_s = TIMER_S if self._is_exact else 0.0
        left_s = (due_ns - time.monotonic_ns()) / 1e9 - early_s
        if left_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s if early_s else math.ceil(left_s * 1e3) / 1e3):
                    await self._stopped.wait()
        while time.monotonic_ns() < due_ns and not self.is_stopping:  # noqa: ASYNC110  no event marks a moment
            await asyncio.sleep(0)
        return not self.is_stopping

    async def _closed(self, number: int, phase: Phase, start_ns: int) -> None:
        await self._until(start_ns)
        lasts_s = phase.span_s or phase.limit_s
        end_ns = start_ns + round(lasts_s * 1e9) if lasts_s else 0
        jobs: Iterable[Job] = cycle(phase.jobs) if phase.span_s else phase.jobs
        shared = iter(jobs)
        loop = asyncio.get_running_loop()
        loops = [self._client(number, phase, shared, client, start_ns, end_ns) for client in range(phase.clients)]
        for one in loops:
            self._spawn(loop, one)
        while self._tasks and not self.is_stopping and (not end_ns or time.monotonic_ns() < end_ns):
            await asyncio.wait(self._tasks, timeout=0.05)

    async def _client(
        self, number: int, phase: Phase, jobs: Iterable[Job], client: int, start_ns: int, end_ns: int
    ) -> None:
        """Run one client: each request after the previous one, or one per tick."""
        period_ns = round(phase.period_s * 1e9)
        tick_ns = start_ns + round(period_ns * client / phase.clients)
        skipped = 0
        for job in jobs:
            if self.is_stopping or (end_ns and max(tick_ns, time.monotonic_ns()) >= end_ns):
                return
            if period_ns:
                if not await self._until(tick_ns):
                    return
                loop = f"X-Period-Ms: {1e3 * phase.period_s:.6g}\r\nX-Skipped-Ticks: {skipped}\r\n"
                wait_s = await self._one(number, job, client, tick_ns, loop)
                await self._pause(wait_s, end_ns)
                tick_ns, skipped = tick_ns + period_ns, 0
                while tick_ns < time.monotonic_ns() and (not end_ns or tick_ns < end_ns):
                    self._skipped(number, job, client, tick_ns)
                    tick_ns, skipped = tick_ns + period_ns, skipped + 1
            else:
                wait_s = await self._one(number, job, client, 0)
                await self._pause(max(wait_s, phase.think_s), end_ns)

    async def _pause(self, wait_s: float, end_ns: int) -> None:
        """Wait, at most until the end of the phase."""
        if wait_s:
            at_ns = time.monotonic_ns() + round(wait_s * 1e9)
            await self._until(min(at_ns, end_ns) if end_ns else at_ns)

    def _skipped(self, number: int, job: Job, client: int, tick_ns: int) -> None:
        self._outbox.put(
            Record(number, job.index, client, tick_ns, 0, 0, tick_ns, 0, "skipped", "", False, "", [], b"")
        )

    async def _one(self, number: int, job: Job, client: int, due_ns: int, headers: str = "") -> float:
        """Send a request and report its answer. Returns the seconds that a closed loop waits before its next one."""
        loop = asyncio.get_running_loop()
        exchange = Exchange(over=loop.create_future())
        self._live[exchange] = None
        self.sent += 1
        body = self._bodies[job.offset : job.offset + job.size_bytes]
        timer = loop.call_later(self.plan.timeout_s, self._cut, exchange, "timeout")
        leaving = None
        if job.cancel_after_s:
            leaving = loop.call_later(job.cancel_after_s, self._cut, exchange, "cancelled")
        try:
            await self._send(exchange, self._request_head(job, headers), body)
        except OSError as error:
            exchange.end("transport", str(error))
        timer.cancel()
        if leaving is not None:
            leaving.cancel()
        del self._live[exchange]
        self.ended += 1
        self._outbox.put(
            Record(
                number,
                job.index,
                client,
                due_ns or exchange.sent_ns,
                exchange.sent_ns,
                exchange.headers_ns,
                exchange.end_ns,
                exchange.status,
                exchange.error,
                exchange.detail,
                exchange.is_reused,
                exchange.content_type,
                exchange.marks,
                bytes(exchange.body),
                exchange.retry_after_s,
            )
        )
        return wait_after(exchange)

    async def _send(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        """Send and wait. A reused connection that the server had just closed is replaced once."""
        self._sent(exchange, await self._pool.send(exchange, head, body))
        await exchange.over
        if exchange.error == "transport" and exchange.is_reused and not exchange.status:
            exchange.over = asyncio.get_running_loop().create_future()
            self._sent(exchange, await self._pool.send_fresh(exchange, head, body))
            await exchange.over

    def _sent(self, exchange: Exchange, connection: Connection) -> None:
        self._live[exchange] = connection
        if exchange.over.done() and exchange.error:  # cut while the connection was opened
            connection.abort()

    def _cut(self, exchange: Exchange, error: str) -> None:
        """End a running request by closing its connection."""
        connection = self._live.get(exchange)
        exchange.end(error)
        if connection is not None:
            connection.abort()

    def _request_head(self, job: Job, headers: str) -> bytes:
        return (
            f"POST {self.plan.server.prefix}{job.path} HTTP/1.1\r\nHost: {self.plan.server.host}\r\n"
            f"Content-Type: {job.content_type}\r\nContent-Length: {job.size_bytes}\r\nAccept: {job.accept}\r\n"
            f"X-Request-ID: {job.request_id}\r\n{headers}{self._head}\r\n"
        ).encode()

    def _spawn(self, loop: asyncio.AbstractEventLoop, task: Coroutine[Any, Any, object]) -> None:
        running = loop.create_task(task)
        self._tasks.add(running)
        running.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        """Forget a task. A bug in it stops the run loudly."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error)
            self.stop("client_error")

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()


def wait_after(exchange: Exchange) -> float:
    """Return the seconds that a client waits after an answer: as a refusal says, or a moment if nothing answered.

    Without the wait, a closed loop would turn an outage of seconds into thousands of refused requests.
    """
    if exchange.status in REFUSALS:
        return min(exchange.retry_after_s, LONGEST_RETRY_S) if exchange.retry_after_s >= 0 else REFUSED_S
    return REFUSED_S if exchange.error == "transport" and not exchange.status else 0.0


def is_exact(phase: Phase) -> bool:
    """Return whether the load leaves time to await each request's moment in turns of the event loop."""
    if phase.clients:
        return phase.period_s > 0 and phase.clients / phase.period_s <= EXACT_PER_S
    return bool(phase.jobs) and len(phase.jobs) <= EXACT_PER_S * max(phase.jobs[-1].due_s, 1.0)


async def report(client: LoadClient, outbox: Outbox) -> None:
    """Send counters four times a second, with the delay of a 10 ms ticker since the last ones."""
    lag_s, at = 0.0, time.monotonic()
    next_report, next_collection = at + REPORT_S, at + COLLECT_S
    while True:
        await asyncio.sleep(TICK_S)
        now = time.monotonic()
        lag_s, at = max(lag_s, now - at - TICK_S), now
        if now >= next_report:
            outbox.put(counters(client, lag_s))
            lag_s, next_report = 0.0, now + REPORT_S
        if now >= next_collection:
            gc.collect()  # of the few objects since the start; the others are frozen
            next_collection = now + COLLECT_S


def counters(client: LoadClient, lag_s: float) -> Counters:
    """Return the state of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Counters(
        client.plan.number,
        time.monotonic_ns(),
        client.sent,
        client.ended,
        client.in_flight,
        time.process_time(),
        int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES,
        lag_s * 1e3,
        usage.ru_nvcsw + usage.ru_nivcsw,
    )


async def serve(plan: ClientPlan, bodies: mmap.mmap | bytes, outbox: Outbox) -> None:
    """Obey the commands: `go PHASE START_NS`, `stop` and `quit`. The end of the pipe is a `quit`."""
    client = LoadClient(plan, bodies, outbox)
    loop = asyncio.get_running_loop()
    quits, running = asyncio.Event(), set[asyncio.Task[None]]()

    def obey(words: list[str]) -> None:
        match words:
            case ["go", phase, start_ns]:
                task = loop.create_task(client.run(int(phase), int(start_ns)))
                running.add(task)
                task.add_done_callback(running.discard)
            case ["stop"]:
                client.stop()
            case _:
                quits.set()

    threading.Thread(target=_read, args=(loop, obey), daemon=True).start()
    outbox.put(ClientReady(plan.number))
    ticker = loop.create_task(report(client, outbox))
    gc.collect()
    gc.freeze()
    gc.disable()  # a pause would look like jitter of the server; `report` collects a little every few seconds
    await quits.wait()
    client.stop()
    ticker.cancel()
    for task in running:
        task.cancel()
    outbox.put(counters(client, 0.0))
    client.close()


def _read(loop: asyncio.AbstractEventLoop, obey: Callable[[list[str]], None]) -> None:
    held = b""
    with suppress(RuntimeError):  # the loop has ended
        while data := os.read(STDIN, READ_BYTES):  # not sys.stdin, whose lock a daemon thread would hold at the end
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                loop.call_soon_threadsafe(obey, line.decode().split())
        loop.call_soon_threadsafe(obey, ["quit"])


def event_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop if it is installed: it costs a third less per request."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def main() -> None:
    """Load the plan and serve until the parent quits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    plan = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=ClientPlan)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=1 << 16)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may write into the stream of messages
    outbox = Outbox(out)
    with Path(plan.bodies).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        bodies = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        with asyncio.Runner(loop_factory=event_loop) as runner:
            runner.run(serve(plan, bodies, outbox))
    outbox.close()


if __name__ == "__main__":
    main()
