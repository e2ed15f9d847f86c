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
from tests.runtime.deployment import Deployment

REQUESTS: Final = int(os.environ.get("MSTAR_SOAK", "300"))
SEED: Final = 20_250
LIMIT_S: Final = 60 + REQUESTS
WARM: Final = REQUESTS // 3
GROWTH_BYTES: Final = 8 << 20
"""What a process may grow by after the warm-up: allocators and rings settle, a leak per request would not."""


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment(max_concurrent_requests=8, max_queue=8) as made:
        yield made


@pytest.mark.timeout(LIMIT_S)
async def test_every_request_has_one_outcome_and_nothing_grows(deployment: Deployment) -> None:
    crowd = Crowd(deployment, SEED)
    print(f"seed {SEED}, {REQUESTS} requests")
    await crowd.run(WARM)
    await asyncio.to_thread(deployment.assert_clean)
    before, open_before = resident(deployment), descriptors(deployment)
    await crowd.run(REQUESTS - WARM)
    await asyncio.to_thread(deployment.assert_clean)
    after, open_after = resident(deployment), descriptors(deployment)
    assert sum(crowd.outcomes.values()) == REQUESTS
    assert {"whole", "left", "cancelled"} <= crowd.outcomes.keys(), crowd.outcomes
    grown = {name: after[name] - before[name] for name in after}
    print(f"outcomes {dict(crowd.outcomes)}, grown {grown}")
    assert all(growth < GROWTH_BYTES for growth in grown.values()), grown
    assert all(open_after[name] <= open_before[name] + 4 for name in open_after), (open_before, open_after)
    assert deployment.admin("/v1")["restarts"] == 0
    assert deployment.complaints() == [], "ends of every kind are no errors of the server"
