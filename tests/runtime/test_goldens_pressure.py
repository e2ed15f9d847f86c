"""Sound under memory pressure: requests that are preempted in turn give the bytes that each gives alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar_core.config.resolved import KVCacheConfig
from tests.runtime.deployment import Deployment
from tests.runtime.golden import Golden, prompt_of
from tests.runtime.test_goldens import hear, say

REQUESTS = 6
PAGES = 30
"""Well below the need of all requests together, which is about 60."""


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden.find()


async def test_preempted_streams_give_the_sound_of_each_alone(golden: Golden, tmp_path: Path) -> None:
    folder = golden.lay_out(tmp_path / "checkpoint")
    pool = KVCacheConfig(pages=PAGES, prefix_cache=False)
    with Deployment(folder=folder, max_seq_len=256, kv_cache=pool) as deployment:
        bodies = [say(golden, prompt_of(n), max_output_tokens=140, temperature=0.9, seed=n) for n in range(REQUESTS)]
        alone = [(await hear(deployment, body))[0].pcm for body in bodies]
        assert deployment.value("worker-0.LLM.preempted") == 0
        together = [heard.pcm for heard in await hear(deployment, *bodies)]
        assert together == alone and all(alone)
        assert deployment.value("worker-0.LLM.preempted") > 0
        deployment.assert_clean()
