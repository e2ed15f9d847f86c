"""Self-test of the load client: its ceiling against a null server, and known delays that it must find again."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from mstar_core.errors import MstarError, UsageError
from mstar_core.workloads import ServedModel, WorkloadRequest
from mstarctl.bench.client.wire import ServerAddress
from mstarctl.bench.environment import ceiling_file
from mstarctl.bench.load.plan import Load
from mstarctl.bench.load.workloads import Workload
from mstarctl.bench.measure.load_metrics import Measures
from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.null_server import NullBehaviour
from mstarctl.bench.result import ResultFolder
from mstarctl.bench.run import BenchRun, RunOptions
from mstarctl.bench.show.display import Display
from mstarctl.bench.target import BenchTarget
from mstarctl.output.durations import parse_duration

CEILING_S: Final = 1.0
STREAMS: Final = 64
STREAM_LINES: Final = 50
TOLERANCE_MS: Final = 2.0
INJECT_RATE: Final = 20.0
STALL_RATE: Final = 10.0
_STALL: Final = re.compile(r"(?P<length>[\d.]+m?s)@(?P<at>[\d.]+m?s)$")


@contextmanager
def null_target(behaviour: NullBehaviour) -> Iterator[BenchTarget]:
    """Run a null server in a process of its own while the block runs."""
    command = [sys.executable, "-m", "mstarctl.bench.null_server", msgspec.json.encode(behaviour).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            port = int(process.stdout.readline() or 0)
            if not port:
                raise MstarError("the null server did not start", hint="its error is above")
            address = ServerAddress(address="127.0.0.1", port=port, host=f"127.0.0.1:{port}")
            yield BenchTarget(
                name="null", model="null", url=f"http://127.0.0.1:{port}", server=address, card=ServedModel(name="null")
            )
        finally:
            process.stdin.close()
            process.wait()


def null_workload() -> Workload:
    """Return a workload of one small request."""

    def draw(card: ServedModel, seed: int) -> Iterator[WorkloadRequest]:
        while True:
            yield WorkloadRequest(outputs=("text",), text="x")

    return Workload(name="null", title="one small request", source=draw)


def null_run(target: BenchTarget, load: Load, folder: Path, processes: int = 1) -> dict[str, Any]:
    """Run a load against a null server and return the facts of its result."""
    options = RunOptions(
        load=load,
        workload=null_workload(),
        measures=Measures(is_late=load.is_open),
        out=folder,
        is_checked=False,
        processes=min(processes, load.concurrency or processes),
        timeout_s=30.0,
        grace_s=10.0,
    )
    with Display("quiet", is_coloured=False) as display:
        return BenchRun(target, options, display).perform()


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestRow:
    """One line of the self-test. found: figures. is_right: whether they match what is known, None without a bound."""

    name: str
    found: str
    is_right: bool | None = None
    per_s: float = 0.0


def ceiling(processes: int) -> list[SelfTestRow]:
    """Return the most requests per second that this host's client can send, for three kinds of answers."""
    rows = []
    for name, clients, lines in (
        ("1 connection, small answer", 1, 1),
        (f"{STREAMS} connections, small answer", STREAMS, 1),
        (f"{STREAMS} streams of {STREAM_LINES} lines", STREAMS, STREAM_LINES),
    ):
        with null_target(NullBehaviour(lines=lines)) as target, tempfile.TemporaryDirectory() as scratch:
            load = Load(concurrency=clients, span_s=CEILING_S, warm_up=clients)
            facts = null_run(target, load, Path(scratch) / "r", processes)
        per_s = facts["metrics"]["throughput"]["value"]
        floor = facts["metrics"]["latency"]["p50"]
        merged = facts["client"]["reads_per_chunk"]
        rows.append(
            SelfTestRow(
                name=name, found=f"{per_s:,.0f} req/s   p50 {floor:.2f} ms   {merged} reads per chunk", per_s=per_s
            )
        )
    return rows


def delayed(delay_s: float, span_s: float = 3.0) -> list[Outcome]:
    """Return the requests of an open load to a null server with a known delay.

    The server states in `total_ms` how long it really held each request, because a busy host wakes it late.
    """
    with null_target(NullBehaviour(delay_s=delay_s)) as target, tempfile.TemporaryDirectory() as scratch:
        load = Load(rate=INJECT_RATE, arrivals="constant", span_s=span_s, warm_up=2)
        null_run(target, load, Path(scratch) / "r")
        return ResultFolder.opened(Path(scratch) / "r").outcomes()


def injected(delay_s: float) -> SelfTestRow:
    """Return whether the report finds a known delay within 2 ms."""
    outcomes = delayed(delay_s)
    waits = [1e3 * (outcome.chunks[0].at_s - outcome.due_s) for outcome in outcomes]
    errors = [wait - outcome.usage["total_ms"] for wait, outcome in zip(waits, outcomes, strict=True)]
    error = statistics.median(errors)
    return SelfTestRow(
        name=f"delay of {1e3 * delay_s:g} ms",
        is_right=abs(error) <= TOLERANCE_MS,
        found=f"ttft p50 {statistics.median(waits):.2f} ms, {error:+.2f} ms of what the server held",
    )


def stalled(stall_s: float, at_s: float, *, clients: int = 0) -> tuple[SelfTestRow, dict[str, Any], list[float]]:
    """Return whether the report shows every request that a stall delays, the facts of the run, and its waits in s.

    clients: use a closed loop of so many clients instead, which sees one late request each.
    """
    behaviour = NullBehaviour(stall_s=stall_s, stall_at_s=at_s, delay_s=0.001)
    with null_target(behaviour) as target, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "r"
        span_s = at_s + stall_s + 1.0
        # Without a warm-up, the first request of the window starts the server's clock.
        load = (
            Load(concurrency=clients, span_s=span_s, warm_up=0, period_s=0.0, think_s=1 / STALL_RATE)
            if clients
            else Load(rate=STALL_RATE, arrivals="constant", span_s=span_s, warm_up=0)
        )
        facts = null_run(target, load, folder)
        lines = (folder / "requests.jsonl").read_text().splitlines()
    is_open = not clients
    waits = [row["end_s"] - (row["due_s"] if is_open else row["sent_s"]) for row in map(json.loads, lines)]
    late = sum(wait > 0.05 for wait in waits)
    expected = round(STALL_RATE * stall_s) if is_open else clients
    longest = 1e3 * max(waits, default=0.0)
    is_right = abs(late - expected) <= 1 and abs(longest - 1e3 * stall_s) <= 1e3 / STALL_RATE + TOLERANCE_MS
    row = SelfTestRow(
        name=f"stall of {stall_s:g} s at {STALL_RATE:g}/s",
        is_right=is_right,
        found=f"{late} late requests of about {expected}, the longest {longest:.0f} ms",
    )
    return row, facts, waits


def parse_stall(text: str) -> tuple[float, float]:
    """Parse `2s@10s` as (length, time). Raises UsageError."""
    stall = _STALL.match(text)
    if stall is None:
        raise UsageError(f"--inject-stall is {text!r}", hint="--inject-stall 2s@10s")
    return parse_duration(stall["length"], "--inject-stall"), parse_duration(stall["at"], "--inject-stall")


def keep_ceiling(rows: Sequence[SelfTestRow], processes: int) -> None:
    """Remember a ceiling, so that later runs can be compared with it."""
    path = ceiling_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    ceiling = {"time": time.time(), "processes": processes, "per_s": {row.name: round(row.per_s) for row in rows}}
    path.write_text(json.dumps(ceiling) + "\n")


def self_test(processes: int, inject: str | None, stall: str | None) -> list[SelfTestRow]:
    """Run the parts that were asked for: the ceiling, or a delay and a stall that must be found."""
    rows = [] if inject or stall else ceiling(processes)
    if rows:
        keep_ceiling(rows, processes)
    if inject:
        rows.append(injected(parse_duration(inject, "--inject")))
    if stall:
        rows.append(stalled(*parse_stall(stall))[0])
    return rows
