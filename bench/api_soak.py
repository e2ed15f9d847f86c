"""Thousands of short requests with random cancellations through a real deployment: outcomes, and what processes hold.

Run from the repository root: `python bench/api_soak.py [--requests 10000] [--save]`. Prints one JSON object. Memory is
sampled while the deployment is idle, after a warm-up that fills the memory of finished requests (4,096 in the api).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from bench.serving.figures import ROOT, head
from tests.runtime.crowd import Crowd, descriptors, resident
from tests.runtime.deployment import Deployment

RESULTS: Final = ROOT / "bench" / "results" / "api"
SEED: Final = 20_250
WARM_MIXED: Final = 500
WARM_SHORT: Final = 4_500
STEPS: Final = 10
"""Samples during the run, so that growth is a slope rather than a difference of two numbers."""


def main() -> None:
    """Measure, print, and save with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="number of requests measured; default: 1000")
    parser.add_argument("--save", action="store_true", help=f"also write it to {RESULTS.relative_to(ROOT)}/soak.json")
    options = parser.parse_args()
    report = {**head(), **asyncio.run(soak(options.requests))}
    print(json.dumps(report, indent=1))
    if options.save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "soak.json").write_text(json.dumps(report, indent=1) + "\n")


async def soak(count: int) -> dict[str, Any]:
    """Warm up, then run `count` requests in `STEPS` parts with a sample of every process before, between and after."""
    with Deployment(max_concurrent_requests=8, max_queue=8) as deployment:
        crowd = Crowd(deployment, SEED)
        await crowd.run(WARM_MIXED)
        await crowd.run_short(min(WARM_SHORT, count))
        crowd.outcomes.clear()
        start = time.monotonic()
        samples = [await sample(deployment, 0)]
        for step in range(1, STEPS + 1):
            await crowd.run(count * step // STEPS - count * (step - 1) // STEPS)
            samples.append(await sample(deployment, sum(crowd.outcomes.values())))
            print(f"{samples[-1]['requests']} requests, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        return {
            "model": "orpheus:tiny",
            "placement": "LLM and snac_decoder on one rank",
            "config": {"device": "cpu", "max_concurrent_requests": 8, "max_queue": 8, "kv_pages": 1024},
            "workload": "10 clients; half whole answers of 1 to 90 ids, a fifth leave after 0 to 3 chunks of 15 s of "
            "sound, a tenth cancel it by id, a tenth have a deadline of 1 to 400 ms, a tenth are refused",
            "seed": SEED,
            "warmup": f"{WARM_MIXED} mixed, {min(WARM_SHORT, count)} of one id",
            "requests": count,
            "outcomes": dict(crowd.outcomes),
            "lost": count - sum(crowd.outcomes.values()),
            "whole_answers_that_differ": 0,  # the clients fail at the first difference
            "wall_s": round(time.monotonic() - start, 1),
            "restarts": deployment.admin("/v1")["restarts"],
            "log_lines_of_errors": len(deployment.complaints()),
            "left_at_the_end": deployment.leaks(),
            "grown_bytes": grown(samples),
            "bytes_per_1000_requests": slopes(samples),
            "samples": samples,
        }


async def sample(deployment: Deployment, requests: int) -> dict[str, Any]:
    """Return what every idle process holds. Fails if anything belongs to a request."""
    await asyncio.to_thread(deployment.assert_clean)
    return {
        "requests": requests,
        "resident_bytes": resident(deployment),
        "descriptors": descriptors(deployment),
        "threads": {name: threads(pid) for name, pid in deployment.pids().items()},
    }


def threads(pid: int) -> int:
    """Return the number of threads of a process."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def grown(samples: list[dict[str, Any]]) -> dict[str, int]:
    """Return the growth of resident bytes by process."""
    first, last = samples[0]["resident_bytes"], samples[-1]["resident_bytes"]
    return {name: last[name] - first[name] for name in last}


def slopes(samples: list[dict[str, Any]]) -> dict[str, float]:
    """Return the growth of resident bytes per 1,000 requests by process: the least-squares slope over all samples."""
    return {name: round(slope(samples, name)) for name in samples[0]["resident_bytes"]}


def slope(samples: list[dict[str, Any]], name: str) -> float:
    points: list[tuple[float, float]] = [(s["requests"] / 1000, s["resident_bytes"][name]) for s in samples]
    x_mean, y_mean = mean([x for x, _ in points]), mean([y for _, y in points])
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    return sum((x - x_mean) * (y - y_mean) for x, y in points) / spread if spread else 0.0


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
