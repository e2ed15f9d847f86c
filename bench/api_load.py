"""Audio streams through the api: CPU time per chunk, added delay, memory, and the effect of clients that do not read.

Run from the repository root: `python bench/api_load.py [--save] [--chunks 100]`. Prints one JSON object. The api is a
separate process with a real pool. A fake worker sends a chunk of 2,048 samples (85.3 ms) to every stream at the pace of
speech over the real transport. The clients, a third process, check every byte. The route is `POST /v1/audio/speech`,
streamed as PCM.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

from bench.serving.figures import ROOT, Figures, head
from tests.api.listeners import Audience, Listened, heard_of, listening
from tests.api.own_process import OwnApi, own_api, spec_in
from tests.fakes.paced import PACE_S, PacedDeployment
from tests.fakes.speech_model import SPEC

RESULTS: Final = ROOT / "bench" / "results" / "api"
COUNTS: Final = (1, 8, 32, 128, 256)
MUTE, SLOW = 8, 8
STALL_S: Final = 5.0
PREBUFFER_S: Final = PACE_S
"""Audio that a player buffers before it starts; a chunk that arrives after its time is a gap."""

SAMPLE_S: Final = 0.1
UNARY: Final = 500


def main() -> None:
    """Measure, print, and save with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"also write it to {RESULTS.relative_to(ROOT)}/load.json")
    parser.add_argument("--chunks", type=int, default=100, help="chunks per stream; default: 100 (8.5 s)")
    options = parser.parse_args()
    figures = Figures()
    phases = asyncio.run(measure(figures, options.chunks))
    report = {
        **head(),
        "model": "a stand-in for the worker",
        "config": {"stall_timeout_s": STALL_S, "pool_processes": 1},
        "workload": f"streams of {options.chunks} chunks of 85.3 ms, PCM over HTTP, every byte checked; then {UNARY} "
        "sequential whole responses of one chunk on one connection",
        "metrics": figures.summary(),
        "phases": phases,
    }
    print(json.dumps(report, indent=1))
    if options.save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "load.json").write_text(json.dumps(report, indent=1) + "\n")


async def measure(figures: Figures, chunks: int) -> list[dict[str, Any]]:
    """Run all phases against one api, and whole responses against another."""
    phases = []
    with tempfile.TemporaryDirectory(prefix="mstar-api-") as folder:
        spec = spec_in(folder, SPEC, api={"stall_timeout_s": STALL_S}, max_concurrent_requests=300)
        async with PacedDeployment(spec.ipc_dir, chunks=chunks) as worker, own_api(spec, worker.supervisor) as api:
            await worker.serve()
            await api.ready()
            for count in COUNTS:
                phases.append(await phase(figures, worker, api, Audience(good=count), f"streams_{count}"))
            mixed = Audience(good=COUNTS[-1] - MUTE - SLOW, mute=MUTE, slow=SLOW)
            phases.append(
                await phase(figures, worker, api, mixed, f"streams_{mixed.good}_beside_{MUTE + SLOW}_stalled")
            )
            phases.append(await phase(figures, worker, api, Audience(good=COUNTS[-1]), f"streams_{COUNTS[-1]}_again"))
    with tempfile.TemporaryDirectory(prefix="mstar-api-") as folder:
        spec = spec_in(folder, SPEC)
        async with (
            PacedDeployment(spec.ipc_dir, chunks=1, pace_s=None) as worker,
            own_api(spec, worker.supervisor) as api,
        ):
            await worker.serve()
            await api.ready()
            await asyncio.to_thread(whole_answers, figures, api)
    return phases


async def phase(
    figures: Figures, worker: PacedDeployment, api: OwnApi, audience: Audience, name: str
) -> dict[str, Any]:
    """Run one audience from its first request to its last byte."""
    print(name, file=sys.stderr, flush=True)
    await asyncio.to_thread(api.ask)  # resets the delays of the previous phase
    worker.behind_s.clear()
    sent, cpu, before = worker.sent, api.cpu_s, api.resident_bytes
    start = time.monotonic()
    with listening(api.port, audience) as pipe:
        receiving = asyncio.create_task(asyncio.to_thread(pipe.recv))
        most = before
        while not receiving.done():
            await asyncio.wait({receiving}, timeout=SAMPLE_S)
            most = max(most, api.resident_bytes)
        heard = heard_of(receiving.result())
    wall = time.monotonic() - start
    held = await asyncio.to_thread(api.ask)
    good, chunks = heard["good"], worker.sent - sent
    note(figures, name, good)
    figures.add(f"loop_lag_{name}", held.pop("lags_s"))
    figures.add(f"worker_behind_{name}", worker.behind_s)
    spent = api.cpu_s - cpu
    figures.add(f"api_cpu_per_chunk_{name}", [spent / chunks])
    return {
        "name": name,
        "good": audience.good,
        "mute": audience.mute,
        "slow": audience.slow,
        "wall_s": round(wall, 2),
        "chunks_sent": chunks,
        "chunks_heard": sum(len(each.at_s) for each in good),
        "whole": sum(each.is_whole for each in good),
        "wrong_chunks": sum(each.wrong for each in good),
        "late_chunks": sum(late(each) for each in good),
        "api_cpu_s": round(spent, 3),
        "api_cores": round(spent / wall, 4),
        "resident_before": before,
        "resident_most": most,
        "resident_after": api.resident_bytes,
        "cut_after_s": [round(b.at_s[0] - b.sent_s, 2) for b in heard["bad"]],
        "held": held,
    }


def note(figures: Figures, name: str, heard: list[Listened]) -> None:
    """Record delays from the worker's send to the client, and gaps between chunks."""
    figures.add(f"chunk_delay_{name}", [delay for each in heard for delay in each.latency_s])
    figures.add(f"chunk_gap_{name}", [later - sooner for each in heard for sooner, later in pairwise(each.at_s)])
    figures.add(f"first_chunk_{name}", [each.at_s[0] - each.sent_s for each in heard if each.at_s])


def late(heard: Listened) -> int:
    """Return the number of chunks too late for a player that starts one chunk late."""
    begin = heard.at_s[0] + PREBUFFER_S if heard.at_s else 0.0
    return sum(at > begin + index * PACE_S for index, at in enumerate(heard.at_s))


def whole_answers(figures: Figures, api: OwnApi) -> None:
    """Measure the overhead of the api for a request without model time: `/generate`, not streamed, no media."""
    body = json.dumps({"text": "x", "output_modalities": ["audio"], "streaming": False})
    walls = []
    with connected(api.port) as connection:
        for number in range(UNARY + 20):
            start = time.monotonic()
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
            if number == 19:
                begun = api.cpu_s
            if number >= 20:
                walls.append(time.monotonic() - start)
    figures.add("whole_answer_added", walls)
    figures.add("whole_answer_api_cpu", [(api.cpu_s - begun) / UNARY])


@contextmanager
def connected(port: int) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        yield connection
    finally:
        connection.close()


if __name__ == "__main__":
    main()
