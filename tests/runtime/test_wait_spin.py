"""Processes busy-poll for messages while requests come, and sleep otherwise."""

from __future__ import annotations

import os
import time
from pathlib import Path

import httpx
import pytest

from tests.runtime.client import SURE, request
from tests.runtime.deployment import Deployment, until

SPAN_S = 6.0
WATCHED_S = 0.5
SPINNING = ("api", "conductor", "worker-0")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def shares(deployment: Deployment) -> dict[str, float]:
    """The CPU time of each process, relative to that of a thread here which takes all it gets for a while.

    On a busy machine both get less.
    """
    pids = {name: pid for name, pid in deployment.pids().items() if name in SPINNING}
    before, begun = {name: cpu_s(pid) for name, pid in pids.items()}, time.thread_time()
    while (taken := time.thread_time() - begun) < WATCHED_S:
        pass
    return {name: (cpu_s(pid) - before[name]) / taken for name, pid in pids.items()}


def ask(deployment: Deployment) -> None:
    answer = httpx.post(f"{deployment.url}/generate", json=request(**SURE, max_output_tokens=60), timeout=60)
    assert answer.status_code == 200


@pytest.mark.timeout(240)
@pytest.mark.parametrize("span_us", [0, round(SPAN_S * 1e6)])
def test_processes_spin_for_a_while_after_a_request_and_sleep_when_nobody_asks(span_us: int) -> None:
    with Deployment(wait_spin_us=span_us) as deployment:
        until(lambda: max(shares(deployment).values()) < 0.1, "rest before the first request")
        ask(deployment)
        if span_us:
            after = shares(deployment)
            assert min(after.values()) > 0.15, after
        until(lambda: max(shares(deployment).values()) < 0.1, "rest behind a request")
