"""Sleep on a GPU: captured graphs replay after a wake, the device gets its memory back, and speech stays the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from mstar_core.config.resolved import KVCacheConfig
from mstar_core.engine.memory.node_memory import NodeMemory, loaded_again
from mstar_core.engine.memory.placed import PlacedSleeper
from mstar_core.engine.memory.virtual_memory import DriverMemory
from tests.runtime.deployment import Deployment, one_rank
from tests.runtime.test_sleep import order, said

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("level", "keeps_copies"), [(1, False), (1, True), (2, False)])
def test_graphs_captured_before_a_sleep_replay_after_it(level: int, keeps_copies: bool, cuda: torch.device) -> None:
    layer, again = (
        torch.nn.Linear(4096, 4096, bias=False, device=cuda, dtype=torch.bfloat16).requires_grad_(False)
        for _ in range(2)
    )
    again.weight.copy_(layer.weight)
    pool = torch.zeros(1 << 30, dtype=torch.uint8, device=cuda)  # several chunks
    sleeper = PlacedSleeper(cuda, DriverMemory(cuda), keeps_copies=keeps_copies)
    sleeper.hold("n", NodeMemory(module=layer, scratch=(pool,)))
    x = torch.randn(8, 4096, device=cuda, dtype=torch.bfloat16)
    layer(x)
    torch.cuda.synchronize(cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x) + pool[:8, None]
    graph.replay()
    torch.cuda.synchronize(cuda)
    before, addresses = y.clone(), (layer.weight.data_ptr(), pool.data_ptr())
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(cuda)[0]
    freed = sleeper.pause("n", level)
    assert freed >= layer.weight.nbytes + pool.nbytes
    assert torch.cuda.mem_get_info(cuda)[0] - free >= freed
    sleeper.resume(["n"], loaded_again(layer, again, sleeper.dropped(["n"])))
    for again_asleep in (False, True):
        if again_asleep:
            sleeper.pause("n", level)
            sleeper.resume(["n"], loaded_again(layer, again, sleeper.dropped(["n"])))
        assert (layer.weight.data_ptr(), pool.data_ptr()) == addresses
        y.zero_()
        graph.replay()
        torch.cuda.synchronize(cuda)
        assert torch.equal(y, before) and not pool.any()


@pytest.fixture(scope="module")
def sleepable() -> Iterator[Deployment]:
    """One rank on the first GPU whose memory can be given back, with captured steps."""
    ranks = tuple(msgspec.structs.replace(rank, device="cuda:0") for rank in one_rank().ranks)
    settings: dict[str, Any] = {
        "dtype": "float32",
        "attention": "torch",
        "max_seq_len": 1024,
        "kv_cache": KVCacheConfig(pages=1024),
        "standby": False,
        "sleepable": True,
    }
    with Deployment(where=msgspec.structs.replace(one_rank(), ranks=ranks), **settings) as running:
        yield running


@pytest.mark.parametrize("body", [{"level": 1}, {"level": 2}, {"nodes": ["LLM"]}, {"level": 2, "nodes": ["LLM"]}])
async def test_a_request_wakes_a_gpu_and_gets_the_same_speech(sleepable: Deployment, body: dict[str, Any]) -> None:
    before = await said(sleepable)
    free = torch.cuda.mem_get_info()[0]
    head = await asyncio.to_thread(order, sleepable, "sleep", **body)
    assert torch.cuda.mem_get_info()[0] - free >= 0.95 * head["given_back_bytes"] > 0
    assert await said(sleepable) == before
    assert sleepable.admin("/v1/")["given_back_bytes"] == 0
    sleepable.assert_clean()
