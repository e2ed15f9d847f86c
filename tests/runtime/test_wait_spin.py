"""Processes busy-poll for messages while requests come, and sleep otherwise."""

from __future__ import annotations

import os
import time
from pathlib import Path

import httpx
import pytest

from tests.runtime.client import SURE, request
from tests.runtime.deployment import Deployment

SPAN_S = 2.0
WATCHED_S = 1.0
SPINNING = ("api", "conductor", "worker-0")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def shares(deployment: Deployment) -> dict[str, float]:
    """The CPU time of each process over a second, relative to that of a thread here which takes all it gets.

    On a busy machine both get less.
    """
    pids = {name: pid for name, pid in deployment.pids().items() if name in SPINNING}
    before, begun = {name: cpu_s(pid) for name, pid in pids.items()}, time.thread_time()
    end = time.monotonic() + WATCHED_S
    while time.monotonic() < end:
        pass
    taken = time.thread_time() - begun
    return {name: (cpu_s(pid) - before[name]) / taken for name, pid in pids.items()}


def ask(deployment: Deployment) -> None:
    answer = httpx.post(f"{deployment.url}/generate", json=request(**SURE, max_output_tokens=60), timeout=60)
    assert answer.status_code == 200


@pytest.mark.timeout(240)
@pytest.mark.parametrize("span_us", [0, round(SPAN_S * 1e6)])
def test_processes_spin_for_a_while_after_a_request_and_sleep_when_nobody_asks(span_us: int) -> None:
    with Deployment(wait_spin_us=span_us) as deployment:
        ask(deployment)
        time.sleep(1.5 * SPAN_S)
        idle = shares(deployment)
        assert max(idle.values()) < 0.1, idle
        ask(deployment)
        after = shares(deployment)
        if span_us:
            assert min(after.values()) > 0.15, after
        else:
            assert max(after.values()) < 0.15, after
