"""Many requests with random ends: each has one outcome, afterwards nothing is held and no process has grown.

MSTAR_SOAK sets the number of requests for runs by hand; `bench/api_soak.py` writes down what a long run showed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Final

import pytest

from tests.runtime.crowd import Crowd, descriptors, resident
from tests.runtime.deployment import Deployment, until

REQUESTS: Final = int(os.environ.get("MSTAR_SOAK", "300"))
SEED: Final = 20_250
LIMIT_S: Final = 300 + REQUESTS
WARM: Final = REQUESTS // 3
GROWTH_BYTES: Final = 8 << 20
"""Allowed growth of a process after the warm-up: allocators and rings settle, a leak per request would not."""


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment(max_concurrent_requests=8, max_queue=8) as made:
        yield made


def opened(deployment: Deployment, before: dict[str, int]) -> set[str]:
    """Processes that hold more descriptors than before, with some room for what they open now and then."""
    return {name for name, count in descriptors(deployment).items() if count > before[name] + 4}


@pytest.mark.timeout(LIMIT_S)
async def test_every_request_has_one_outcome_and_nothing_grows(deployment: Deployment) -> None:
    crowd = Crowd(deployment, SEED)
    print(f"seed {SEED}, {REQUESTS} requests")
    await crowd.run(WARM)
    await asyncio.to_thread(deployment.assert_clean)
    before, open_before = resident(deployment), descriptors(deployment)
    await crowd.run(REQUESTS - WARM)
    await asyncio.to_thread(deployment.assert_clean)
    await asyncio.to_thread(until, lambda: not opened(deployment, open_before), "the end of every connection")
    after = resident(deployment)
    assert sum(crowd.outcomes.values()) == REQUESTS
    assert {"whole", "left", "cancelled"} <= crowd.outcomes.keys(), crowd.outcomes
    grown = {name: after[name] - before[name] for name in after}
    print(f"outcomes {dict(crowd.outcomes)}, grown {grown}")
    assert all(growth < GROWTH_BYTES for growth in grown.values()), grown
    assert deployment.admin("/v1")["restarts"] == 0
    assert deployment.complaints() == [], "no end of a request is an error of the server"
